"""The metrics of the transfer connector: a part of the table in `metric_table`."""

from kvferry.metric import ANY, COUNT_BUCKETS, SIZE_BUCKETS, counter, gauge, histogram, seconds

_REFUSALS = (
    "gone",
    "generation",
    "tokens",
    "foreign",
    "restarted",
    "unreachable",
    "late",
)

TRANSFER = (
    counter(
        "transfer_requests",
        "requests",
        "Requests that came to a consumer with parameters of a producer, by what came of them. All"
        " but `loaded` are computed here. `unsigned`, `forged`, `malformed`: a client's own;"
        " `other_text`: an offer for other tokens; `declined`: another connector was first;"
        " `direction`: an appointment, and this engine pulls.",
        "`forged`: secrets differ, or somebody tries. `late`, `gone`, `unreachable`: look at the"
        " producers and at `lease_s`. `namespace`: the engines differ in model or settings.",
        outcome=(
            "loaded",
            "failed",
            "aborted",
            "declined",
            "local_hit",
            "short",
            "unsigned",
            "forged",
            "malformed",
            "namespace",
            "direction",
            "other_text",
            "over",
            "quarantine",
            "internal",
            *_REFUSALS,
        ),
    ),
    gauge(
        "transfer_requests_waiting",
        "requests",
        "Requests of a consumer that wait for a producer: asked, or being loaded. vLLM counts them"
        " neither as running nor as waiting while they load.",
        "Grows: producers are slow or gone.",
    ),
    seconds(
        "transfer_wait",
        "From a request's arrival until its producer has granted it.",
        "Near `claim_deadline_s`: look at the producers.",
    ),
    seconds(
        "transfer_load",
        "From a request's admission until its KV is here, or has failed.",
        "Longer than computing: raise `tokens_min`, or look at the network.",
    ),
    counter(
        "transfer_loads",
        "loads",
        "Loads at a rank, by how they ended. `expired`: what was read may not have been the"
        " request's any more; `blocks`: the producer no longer had them; `torn`: a page was not"
        " what its producer says that it wrote.",
        "`late`: raise `read_deadline_s` or look at the network. `expired`: raise `lease_s`.",
        outcome=(
            "done",
            "dropped",
            "expired",
            "torn",
            "lost",
            "refused",
            "blocks",
            "quarantine",
            "reset",
            "internal",
            *_REFUSALS,
        ),
    ),
    counter(
        "transfer_reads",
        "reads",
        "Reads that ended. `lost`: the peer or the way to it broke; `refused`: never began.",
        "`lost` without a restart: look at the network.",
        outcome=("done", "lost", "refused"),
    ),
    counter("transfer_read_bytes", "bytes", "Bytes read from producers.", "None."),
    counter(
        "transfer_descriptors",
        "pieces",
        "Pieces that reads named.",
        "Bytes / pieces of a few KiB: use larger blocks, or a layout that packs layers together.",
    ),
    histogram(
        "transfer_read_size_bytes",
        "bytes",
        "One read that is done, by the producer it came from (at most 64; `others`).",
        "Small: each read costs about a millisecond. Raise `slot_bytes`.",
        SIZE_BUCKETS,
        peer=ANY,
    ),
    histogram(
        "transfer_read_descriptors",
        "pieces",
        "Pieces that one read names, by producer.",
        "Bytes / pieces of a few KiB: use larger blocks, or a layout that packs layers together.",
        COUNT_BUCKETS,
        peer=ANY,
    ),
    seconds(
        "transfer_post",
        "Beginning one read, by producer.",
        "Near the read seconds: too many pieces for this transport.",
        peer=ANY,
    ),
    seconds(
        "transfer_read",
        "One read, from beginning to end, by producer.",
        "Bytes / seconds: the rate. One peer is slower: look at its host and network.",
        peer=ANY,
    ),
    counter(
        "transfer_transport_reads",
        "reads",
        "Reads that began, by the backend that NIXL took for them.",
        "Which transports UCX took below it: `kvferry doctor --transfer`.",
        transport=ANY,
    ),
    counter(
        "transfer_late_reads",
        "reads",
        "Reads that ended when the blocks were no longer surely the request's: thrown away.",
        "Each would have been a wrong answer. Raise `lease_s`; look for steps that take seconds.",
    ),
    counter(
        "transfer_confirmations",
        "reads",
        "Reads that ended later than the lease was known to last, and what the producer said.",
        "Many: renewals get lost or are slow.",
        outcome=("asked", "confirmed"),
    ),
    counter(
        "transfer_pages",
        "pages",
        "Pages that this consumer invited (`direction` is `push`), by what their producer said.",
        "`lost`: look at the network. `not_written`: nobody wanted it any more, or the prefill was"
        " given up.",
        outcome=("written", "not_written", "lost"),
    ),
    counter("transfer_pushed_bytes", "bytes", "Bytes of pages that were written here.", "None."),
    seconds(
        "transfer_page",
        "From inviting a page until it is written, by producer: its prefill is part of it.",
        "Longer than a prefill: look at the producer's staging and at the network.",
        peer=ANY,
    ),
    counter(
        "transfer_torn_pages",
        "pages",
        "Pages that were not what their producer says that it wrote: thrown away.",
        "Each would have been a wrong answer: a late write, or broken memory or network.",
    ),
    gauge(
        "transfer_quarantine_bytes",
        "bytes",
        "Staging of reads and writes that were given up and cannot be called back.",
        "Stays: a producer stands still. At `quarantine_bytes_max` nothing new is transferred.",
    ),
    counter(
        "transfer_claims_refused",
        "transfers",
        "Transfers that a rank could not have, by reason.",
        "As for the requests.",
        reason=_REFUSALS,
    ),
    counter(
        "transfer_sessions_lost",
        "",
        "Connections to a producer's rank that failed and are made anew.",
        "Steady: look at the network.",
    ),
    counter(
        "transfer_handshakes",
        "",
        "Handshakes that this consumer began. `away`: no answer, or another process.",
        "`foreign`: the log names the fields that differ.",
        outcome=("known", "away", "foreign"),
    ),
    seconds("transfer_handshake", "One handshake that this consumer began.", "See those `away`."),
    counter(
        "transfer_handshakes_served",
        "",
        "Connections to this producer's listener. `foreign`: not of ours, or another secret.",
        "`foreign`: somebody scans the port, or secrets differ. `busy`: too many at a time.",
        outcome=("served", "incompatible", "foreign", "broken", "failed", "busy"),
    ),
    counter(
        "transfer_messages_dropped",
        "messages",
        "Messages that were not of ours, or whose sender could not be answered.",
        "`foreign` steadily: another deployment has another secret, or somebody tries.",
        reason=("foreign", "no_way_back"),
    ),
    counter(
        "transfer_leases",
        "requests",
        "Finished prefills that a consumer was to have. `no_room`, `unnamed`: nothing was offered,"
        " since too much is kept already, or since nothing names the prompt (an adapter whose files"
        " have changed).",
        "`no_room`: consumers are slow, or `leased_blocks_max` is small.",
        outcome=("granted", "no_room", "unnamed"),
    ),
    counter(
        "transfer_leases_ended",
        "leases",
        "Leases that ended at a rank. `expired`: nobody said that he was done; `cancelled`: of a"
        " prefill that was to be pushed, and was aborted or not kept.",
        "`expired`: consumers never came (a router that dropped requests), or are cut off.",
        reason=("released", "expired", "cancelled"),
    ),
    gauge("transfer_leases_held", "leases", "Leases that a rank keeps.", "See the oldest one."),
    gauge(
        "transfer_oldest_lease_seconds",
        "seconds",
        "Age of the oldest lease of a rank.",
        "Near `lease_total_s`: a consumer claims and does not read.",
    ),
    counter(
        "transfer_writes",
        "pages",
        "Pages that this producer began to write (`direction` is `push`). `lost`: the consumer or"
        " the way to it broke; `refused`: never began.",
        "`lost` without a restart: look at the network.",
        outcome=("done", "lost", "refused"),
    ),
    counter("transfer_written_bytes", "bytes", "Bytes written to consumers.", "None."),
    gauge(
        "transfer_blocks_leased",
        "blocks",
        "Blocks of this producer that are kept for consumers.",
        "Near `leased_blocks_max`: nothing new is offered.",
    ),
)
