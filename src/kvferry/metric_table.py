"""The one table of all metrics: what each means, and what an operator does about it.

docs/operations.md lists every one of them; a test compares.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from kvferry.errors import InternalError

BAD_OUTCOMES = ("absent", "foreign", "corrupt", "short", "io_error", "no_space")
CATALOG_VERBS = (
    "open",
    "attach",
    "lookup",
    "lookup_packed",
    "reserve",
    "commit",
    "abort",
    "touch",
    "evict",
    "sweep",
    "grow",
    "grown",
    "shrunk",
    "adopt",
    "stats",
    "segments",
    "snapshot",
)


class Kind(Enum):
    """As in Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the table. `labels`: each label with all its values; at most one label."""

    name: str
    kind: Kind
    unit: str
    meaning: str
    action: str
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def label_key(self, labels: Mapping[str, str]) -> str:
        """The inner key of a snapshot. Raises InternalError on a label that is not in the table."""
        if labels.keys() != self.labels.keys():
            raise InternalError(
                "metrics.labels", f"{self.name} has labels {list(self.labels)}", got=dict(labels)
            )
        for name, value in labels.items():
            if value not in self.labels[name]:
                raise InternalError("metrics.label", f"{self.name}: {name}={value!r} is not known")
        return ",".join(labels[name] for name in self.labels)


def _counter(name: str, unit: str, meaning: str, action: str, **labels: tuple[str, ...]) -> Metric:
    return Metric(f"kvferry_{name}_total", Kind.COUNTER, unit, meaning, action, labels)


def _gauge(name: str, unit: str, meaning: str, action: str) -> Metric:
    return Metric(f"kvferry_{name}", Kind.GAUGE, unit, meaning, action)


def _seconds(name: str, meaning: str, action: str, **labels: tuple[str, ...]) -> Metric:
    return Metric(f"kvferry_{name}_seconds", Kind.HISTOGRAM, "seconds", meaning, action, labels)


_LOOKUPS = (
    _counter(
        "lookups",
        "requests",
        "Requests by what their lookup found. `skipped`: not to be looked up (prompt"
        " log-probabilities, embeddings without a digest).",
        "Few hits where prefixes repeat: compare `kvferry status` for the namespace of each engine;"
        " different namespaces do not share. `late` and `unavailable`: look at the catalog.",
        outcome=("hit", "miss", "late", "unavailable", "skipped"),
    ),
    _counter(
        "lookup_tokens",
        "tokens",
        "Prompt tokens in full chunks that were looked up and that the engine did not have.",
        "The denominator of the hit rate.",
    ),
    _counter(
        "hit_tokens",
        "tokens",
        "Of these, tokens that the catalog offered.",
        "Hit rate = hit tokens / lookup tokens. Falls after evictions: raise `capacity_bytes`.",
    ),
    _counter(
        "loads_declined",
        "requests",
        "Hits that were not loaded. `cost`: computing is faster by measurement; `short`: fewer"
        " than `load_tokens_min`; `quarantined`: a page that failed lately; `no_room`: the engine"
        " gave no blocks.",
        "`cost` all the time: storage is slow for this model; see the two speeds below.",
        reason=("cost", "short", "quarantined", "no_room"),
    ),
    _seconds(
        "lookup",
        "From a request's arrival to the answer of its lookup.",
        "Near `lookup_deadline_s`: the catalog or its disk is slow; run `kvferry bench catalog`.",
    ),
)

_LOADS = (
    _counter(
        "loads",
        "requests",
        "Loads that ended. `partial`: some chunks failed and were recomputed.",
        "`failed` and `partial`: see the load failures by reason.",
        outcome=("loaded", "partial", "failed", "aborted"),
    ),
    _counter("loaded_tokens", "tokens", "Tokens loaded into the engine.", "What kvferry saved."),
    _counter(
        "load_bytes", "bytes", "Bytes read, verified and scattered.", "Divide by the load seconds."
    ),
    _counter(
        "load_failures",
        "chunks",
        "Chunks that a load could not deliver; their tokens are recomputed. `late`: not within"
        " `load_deadline_s`; `no_staging`: no room in `staging_bytes`; `reset`: weights or cache"
        " were reset meanwhile.",
        "`absent`, `foreign`: evicted meanwhile, or a stale catalog; harmless when few. `corrupt`,"
        " `short`: run `kvferry check --fix` and look at the disk. `io_error`: see the system's"
        " log. `late`: storage is slow. `no_staging`: raise `staging_bytes`.",
        reason=(*BAD_OUTCOMES, "late", "aborted", "no_staging", "reset"),
    ),
    _seconds(
        "load",
        "From a load's start to its end, read, verify and scatter.",
        "Rising: storage is shared or slow; run `kvferry bench io`.",
    ),
    _gauge("loads_pending", "requests", "Loads under way.", "Growing: storage is too slow."),
)

_STORES = (
    _counter(
        "stores",
        "chunks",
        "Stores that ended, by rank. `written`: this rank's part is committed, others are missing;"
        " `published`: the page became visible; `duplicate`: another engine was first.",
        "Many duplicates: engines compute the same prefixes at once; route by prefix.",
        outcome=("published", "written", "duplicate", "dropped"),
    ),
    _counter(
        "store_drops",
        "chunks",
        "Stores given up; no request waits for them. `no_slot`: none reserved; `no_staging`: more"
        " in flight than `staging_bytes`; `late`: past `store_deadline_s`; `fenced`: the engine"
        " needed the blocks first; `rewritten`: it had used them again already; `expired`: the"
        " reservation was gone; `unavailable`: the catalog"
        " did not answer; `reset`: weights or cache were reset; `closing`: the engine stopped.",
        "`no_slot`: the store is full of pages in use, raise `capacity_bytes`, or raise"
        " `reserve_ahead_count`. `no_space`: the disk is full below the store's capacity."
        " `no_staging`, `late`, `fenced`: storage is slower than prefill. `absent`: a segment file"
        " was removed by hand.",
        reason=(
            *BAD_OUTCOMES,
            "no_slot",
            "no_staging",
            "late",
            "fenced",
            "rewritten",
            "expired",
            "unavailable",
            "reset",
            "closing",
        ),
    ),
    _counter("stored_tokens", "tokens", "Tokens in chunks published by this engine.", "None."),
    _counter("store_bytes", "bytes", "Bytes gathered and written.", "Load on the storage."),
    _seconds(
        "store",
        "From the plan of a store to its commit.",
        "Near `store_deadline_s`: storage is slower than prefill; add `write_threads` or disks.",
    ),
    _seconds(
        "fence_wait",
        "Time that an engine step waited until blocks to be overwritten had been gathered.",
        "Above a millisecond often: raise `copy_threads`.",
    ),
    _gauge("stores_pending", "chunks", "Stores under way.", "At its bound: see the drops."),
    _gauge(
        "staging_used_bytes",
        "bytes",
        "Staging in use by jobs.",
        "At `staging_bytes` for long: raise it. Not zero on an idle engine: report a bug.",
    ),
    _gauge(
        "slots_reserved_ahead",
        "slots",
        "Reserved slots in the pool of this engine.",
        "Zero while storing: raise `reserve_ahead_count` or `capacity_bytes`.",
    ),
)

_CATALOG = (
    _gauge(
        "breaker_open",
        "",
        "1 while the catalog does not answer and the engine runs as if there were no kvferry.",
        "Alert on it. It closes by itself; look at the catalog's disk and its owner.",
    ),
    _counter("breaker_openings", "", "How often the breaker opened.", "More than a few: as above."),
    _counter(
        "catalog_errors",
        "calls",
        "Catalog calls that failed or were late.",
        "See the engine's log for the first one.",
        verb=CATALOG_VERBS,
    ),
    _seconds(
        "catalog_call",
        "Duration of catalog calls on the runner thread.",
        "Run `kvferry bench catalog`; the state folder must be on a local disk.",
        verb=CATALOG_VERBS,
    ),
    _gauge(
        "catalog_calls_pending",
        "calls",
        "Calls that wait for the runner thread.",
        "Growing: the catalog is too slow for the load.",
    ),
    _counter(
        "catalog_adoptions",
        "pages",
        "Pages found on the store and taken into a new catalog.",
        "Expected once after the catalog was lost or moved.",
    ),
    _counter(
        "catalog_takeovers",
        "",
        "How often a catalog took a store over from an owner that was silent.",
        "More than once: two hosts use one store with a catalog each; give them one catalog.",
    ),
)

_SPACE = (
    _gauge("pages", "pages", "Pages that can be found, all namespaces.", "None."),
    _gauge("capacity_bytes", "bytes", "Budget of the store.", "`kvferry resize` changes it."),
    _gauge("used_bytes", "bytes", "What the store takes on its medium.", "At capacity: normal."),
    _counter(
        "evictions",
        "pages",
        "Pages evicted to make room.",
        "Many, with a falling hit rate: raise `capacity_bytes`.",
    ),
    _counter(
        "evictions_of_bad",
        "pages",
        "Pages evicted since a load found them unreadable.",
        "See the load failures by reason.",
    ),
    _counter(
        "reservations_expired",
        "slots",
        "Reservations whose writer never came back.",
        "Follows a crash. Steady: storage is slower than `reservation_lease_s`.",
    ),
    _counter("segments_created", "segments", "Segment files made.", "None."),
    _counter("segments_deleted", "segments", "Segment files removed.", "Steady: models compete."),
)

_CONDITION = (
    _gauge(
        "buffered_io",
        "",
        "1 if the file system refused direct I/O and the page cache is used.",
        "Slower and takes host memory; use a file system with direct I/O, or set `direct_io`.",
    ),
    _gauge(
        "load_tokens_per_second",
        "tokens per second",
        "Load speed as the cost model measured it.",
        "Low: run `kvferry bench io`.",
    ),
    _gauge(
        "prefill_tokens_per_second",
        "tokens per second",
        "Prefill speed as the cost model measured it.",
        "With the load speed: why loads are declined.",
    ),
    _counter(
        "identity_refusals",
        "",
        "Ranks or stores of another identity, refused.",
        "The engine's log names the field that differs.",
    ),
    _counter(
        "namespace_resets",
        "",
        "Cache resets and weight updates, after which the namespace is private or new.",
        "Set `weights_id` to share again after an update.",
    ),
    _gauge(
        "standing_aside",
        "",
        "1 after an internal error: the engine serves on without kvferry.",
        "Alert on it. Restart the engine, and report the error in its log.",
    ),
    _counter(
        "internal_errors",
        "",
        "Errors that are kvferry's own fault.",
        "Report the error in the engine's log.",
        where=("facade", "planner", "jobs", "runner"),
    ),
)

_REFUSALS = (
    "gone",
    "generation",
    "tokens",
    "foreign",
    "restarted",
    "unreachable",
    "late",
)

_TRANSFER = (
    _counter(
        "transfer_requests",
        "requests",
        "Requests that came to a consumer with parameters of a producer, by what came of them. All"
        " but `loaded` are computed here. `unsigned`, `forged`, `malformed`: a client's own;"
        " `other_text`: an offer for other tokens; `declined`: another connector was first.",
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
            "other_text",
            "over",
            "quarantine",
            "internal",
            *_REFUSALS,
        ),
    ),
    _gauge(
        "transfer_requests_waiting",
        "requests",
        "Requests of a consumer that wait for a producer: asked, or being loaded. vLLM counts them"
        " neither as running nor as waiting while they load.",
        "Grows: producers are slow or gone.",
    ),
    _seconds(
        "transfer_wait",
        "From a request's arrival until its producer has granted it.",
        "Near `claim_deadline_s`: look at the producers.",
    ),
    _seconds(
        "transfer_load",
        "From a request's admission until its KV is here, or has failed.",
        "Longer than computing: raise `tokens_min`, or look at the network.",
    ),
    _counter(
        "transfer_loads",
        "loads",
        "Loads at a rank, by how they ended. `expired`: what was read may not have been the"
        " request's any more; `blocks`: the producer no longer had them.",
        "`late`: raise `read_deadline_s` or look at the network. `expired`: raise `lease_s`.",
        outcome=(
            "done",
            "dropped",
            "expired",
            "lost",
            "refused",
            "blocks",
            "quarantine",
            "reset",
            "internal",
            *_REFUSALS,
        ),
    ),
    _counter(
        "transfer_reads",
        "reads",
        "Reads that ended. `lost`: the peer or the way to it broke; `refused`: never began.",
        "`lost` without a restart: look at the network.",
        outcome=("done", "lost", "refused"),
    ),
    _counter("transfer_read_bytes", "bytes", "Bytes read from producers.", "None."),
    _counter(
        "transfer_descriptors",
        "pieces",
        "Pieces that reads named.",
        "Bytes / pieces of a few KiB: use larger blocks, or a layout that packs layers together.",
    ),
    _seconds(
        "transfer_post",
        "Beginning one read.",
        "Near the read seconds: too many pieces for this transport.",
    ),
    _seconds("transfer_read", "One read, from beginning to end.", "Bytes / seconds: the rate."),
    _counter(
        "transfer_late_reads",
        "reads",
        "Reads that ended when the blocks were no longer surely the request's: thrown away.",
        "Each would have been a wrong answer. Raise `lease_s`; look for steps that take seconds.",
    ),
    _counter(
        "transfer_confirmations",
        "reads",
        "Reads that ended later than the lease was known to last, and what the producer said.",
        "Many: renewals get lost or are slow.",
        outcome=("asked", "confirmed"),
    ),
    _gauge(
        "transfer_quarantine_bytes",
        "bytes",
        "Staging of reads that were given up and cannot be called back.",
        "Stays: a producer stands still. At `quarantine_bytes_max` nothing new is transferred.",
    ),
    _counter(
        "transfer_claims_refused",
        "transfers",
        "Transfers that a rank could not have, by reason.",
        "As for the requests.",
        reason=_REFUSALS,
    ),
    _counter(
        "transfer_sessions_lost",
        "",
        "Connections to a producer's rank that failed and are made anew.",
        "Steady: look at the network.",
    ),
    _counter(
        "transfer_handshakes",
        "",
        "Handshakes that this consumer began. `away`: no answer, or another process.",
        "`foreign`: the log names the fields that differ.",
        outcome=("known", "away", "foreign"),
    ),
    _seconds("transfer_handshake", "One handshake that this consumer began.", "See those `away`."),
    _counter(
        "transfer_handshakes_served",
        "",
        "Connections to this producer's listener. `foreign`: not of ours, or another secret.",
        "`foreign`: somebody scans the port, or secrets differ. `busy`: too many at a time.",
        outcome=("served", "incompatible", "foreign", "broken", "failed", "busy"),
    ),
    _counter(
        "transfer_messages_dropped",
        "messages",
        "Messages that were not of ours, or whose sender could not be answered.",
        "`foreign` steadily: another deployment has another secret, or somebody tries.",
        reason=("foreign", "no_way_back"),
    ),
    _counter(
        "transfer_leases",
        "requests",
        "Finished prefills that a consumer was to have. `no_room`, `unnamed`: nothing was offered,"
        " since too much is kept already, or since nothing names the prompt (an adapter whose files"
        " have changed).",
        "`no_room`: consumers are slow, or `leased_blocks_max` is small.",
        outcome=("granted", "no_room", "unnamed"),
    ),
    _counter(
        "transfer_leases_ended",
        "leases",
        "Leases that ended at a rank. `expired`: nobody said that he was done.",
        "`expired`: consumers never came (a router that dropped requests), or are cut off.",
        reason=("released", "expired"),
    ),
    _gauge("transfer_leases_held", "leases", "Leases that a rank keeps.", "See the oldest one."),
    _gauge(
        "transfer_oldest_lease_seconds",
        "seconds",
        "Age of the oldest lease of a rank.",
        "Near `lease_total_s`: a consumer claims and does not read.",
    ),
    _gauge(
        "transfer_blocks_leased",
        "blocks",
        "Blocks of this producer that are kept for consumers.",
        "Near `leased_blocks_max`: nothing new is offered.",
    ),
)

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (*_LOOKUPS, *_LOADS, *_STORES, *_CATALOG, *_SPACE, *_TRANSFER, *_CONDITION)
}
