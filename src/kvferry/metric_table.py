"""The one table of all metrics: what each means, and what an operator does about it.

docs/operations.md lists every one of them; a test compares.
"""

from kvferry.exporter_metrics import EXPORTER
from kvferry.metric import Metric, counter, gauge, seconds
from kvferry.transfer_metrics import TRANSFER

BAD_OUTCOMES = ("absent", "foreign", "corrupt", "short", "io_error", "no_space")
CATALOG_VERBS = (
    "open",
    "attach",
    "lookup",
    "lookup_packed",
    "present",
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
    "set_quotas",
    "stats",
    "hottest",
    "segments",
    "snapshot",
)


_LOOKUPS = (
    counter(
        "lookups",
        "requests",
        "Requests by what their lookup found. `skipped`: not to be looked up (prompt"
        " log-probabilities, embeddings without a digest).",
        "Few hits where prefixes repeat: compare `kvferry status` for the namespace of each engine;"
        " different namespaces do not share. `late` and `unavailable`: look at the catalog.",
        outcome=("hit", "miss", "late", "unavailable", "skipped"),
    ),
    counter(
        "lookup_tokens",
        "tokens",
        "Prompt tokens in full chunks that were looked up and that the engine did not have.",
        "The denominator of the hit rate.",
    ),
    counter(
        "hit_tokens",
        "tokens",
        "Of these, tokens that the catalog offered.",
        "Hit rate = hit tokens / lookup tokens. Falls after evictions: raise `capacity_bytes`.",
    ),
    counter(
        "loads_declined",
        "requests",
        "Hits that were not loaded. `cost`: computing is faster by measurement; `short`: fewer"
        " than `load_tokens_min`; `quarantined`: a page that failed lately; `no_room`: the engine"
        " gave no blocks.",
        "`cost` all the time: storage is slow for this model; see the two speeds below.",
        reason=("cost", "short", "quarantined", "no_room"),
    ),
    seconds(
        "lookup",
        "From a request's arrival to the answer of its lookup.",
        "Near `lookup_deadline_s`: the catalog or its disk is slow; run `kvferry bench catalog`.",
    ),
)

_LOADS = (
    counter(
        "loads",
        "requests",
        "Loads that ended. `partial`: some chunks failed and were recomputed.",
        "`failed` and `partial`: see the load failures by reason.",
        outcome=("loaded", "partial", "failed", "aborted"),
    ),
    counter("loaded_tokens", "tokens", "Tokens loaded into the engine.", "What kvferry saved."),
    counter(
        "load_bytes", "bytes", "Bytes read, verified and scattered.", "Divide by the load seconds."
    ),
    counter(
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
    seconds(
        "load",
        "From a load's start to its end, read, verify and scatter.",
        "Rising: storage is shared or slow; run `kvferry bench io`.",
    ),
    gauge("loads_pending", "requests", "Loads under way.", "Growing: storage is too slow."),
)

_STORES = (
    counter(
        "stores",
        "chunks",
        "Stores that ended, by rank. `written`: this rank's part is committed, others are missing;"
        " `published`: the page became visible; `duplicate`: another engine was first.",
        "Many duplicates: engines compute the same prefixes at once; route by prefix.",
        outcome=("published", "written", "duplicate", "dropped"),
    ),
    counter(
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
    counter("stored_tokens", "tokens", "Tokens in chunks published by this engine.", "None."),
    counter("store_bytes", "bytes", "Bytes gathered and written.", "Load on the storage."),
    seconds(
        "store",
        "From the plan of a store to its commit.",
        "Near `store_deadline_s`: storage is slower than prefill; add `write_threads` or disks.",
    ),
    seconds(
        "fence_wait",
        "Time that an engine step waited until blocks to be overwritten had been gathered.",
        "Above a millisecond often: raise `copy_threads`.",
    ),
    gauge("stores_pending", "chunks", "Stores under way.", "At its bound: see the drops."),
    gauge(
        "staging_used_bytes",
        "bytes",
        "Staging in use by jobs.",
        "At `staging_bytes` for long: raise it. Not zero on an idle engine: report a bug.",
    ),
    gauge(
        "overdue_ios",
        "I/Os",
        "I/Os without an answer for 30 s (`usrbio:`). Their part of staging is out of use until"
        " they are answered, or given up 150 s after they began.",
        "Not zero: the 3FS daemon or a storage target hangs; see their logs.",
    ),
    counter(
        "ios_overdue",
        "I/Os",
        "All I/Os that were without an answer for 30 s (`usrbio:`).",
        "As above, for what is over.",
    ),
    gauge(
        "slots_reserved_ahead",
        "slots",
        "Reserved slots in the pool of this engine.",
        "Zero while storing: raise `reserve_ahead_count` or `capacity_bytes`.",
    ),
)

_CATALOG = (
    gauge(
        "breaker_open",
        "",
        "1 while the catalog does not answer and the engine runs as if there were no kvferry.",
        "Alert on it. It closes by itself; look at the catalog's disk and its owner.",
    ),
    counter("breaker_openings", "", "How often the breaker opened.", "More than a few: as above."),
    counter(
        "catalog_errors",
        "calls",
        "Catalog calls that failed or were late.",
        "See the engine's log for the first one.",
        verb=CATALOG_VERBS,
    ),
    seconds(
        "catalog_call",
        "Duration of catalog calls on the runner thread.",
        "Run `kvferry bench catalog`; the state folder must be on a local disk.",
        verb=CATALOG_VERBS,
    ),
    gauge(
        "catalog_calls_pending",
        "calls",
        "Calls that wait for the runner thread.",
        "Growing: the catalog is too slow for the load.",
    ),
    counter(
        "catalog_adoptions",
        "pages",
        "Pages found on the store and taken into a new catalog.",
        "Expected once after the catalog was lost or moved.",
    ),
    counter(
        "catalog_losses",
        "",
        "How often the catalog's server was found to be another than before, or without records.",
        "Now and then, with restarts of the server: the pages are found again by themselves. Often:"
        " keep its append-only file on a disk, and see why it restarts.",
    ),
    counter(
        "catalog_takeovers",
        "",
        "How often a catalog took a store over from an owner that was silent.",
        "More than once: two hosts use one store with a catalog each; give them one catalog.",
    ),
)

_SPACE = (
    gauge("pages", "pages", "Pages that can be found, all namespaces.", "None."),
    gauge("capacity_bytes", "bytes", "Budget of the store.", "`kvferry resize` changes it."),
    gauge("used_bytes", "bytes", "What the store takes on its medium.", "At capacity: normal."),
    counter(
        "evictions",
        "pages",
        "Pages evicted to make room.",
        "Many, with a falling hit rate: raise `capacity_bytes`.",
    ),
    counter(
        "quota_evictions",
        "pages",
        "Of these, pages that went for a quota: the engine's tenant or namespace had its maximum,"
        " or took what it is guaranteed from others, or was above its maximum.",
        "At a maximum: `kvferry limit` with a higher one, if the store has room.",
    ),
    counter(
        "pages_lapsed",
        "pages",
        "Of the evictions, pages that nobody had used for the time to live of their tenant, their"
        " namespace or the store.",
        "None: `kvferry limit` set it.",
    ),
    counter(
        "quota_refusals",
        "requests",
        "Times the store did not grow for this engine since its tenant or namespace has its"
        " maximum, or since others are still to get what they are guaranteed.",
        "Steady: the tenant wants more than its maximum; `kvferry limit` shows and changes it.",
    ),
    counter(
        "evictions_of_bad",
        "pages",
        "Pages evicted since a load found them unreadable.",
        "See the load failures by reason.",
    ),
    counter(
        "reservations_expired",
        "slots",
        "Reservations whose writer never came back.",
        "Follows a crash. Steady: storage is slower than `reservation_lease_s`.",
    ),
    counter("segments_created", "segments", "Segment files made.", "None."),
    counter("segments_deleted", "segments", "Segment files removed.", "Steady: models compete."),
)

_CONDITION = (
    gauge(
        "buffered_io",
        "",
        "1 if the file system refused direct I/O and the page cache is used.",
        "Slower and takes host memory; use a file system with direct I/O, or set `direct_io`.",
    ),
    gauge(
        "roots_out",
        "roots",
        "Of a store over several roots: those whose pages are misses now.",
        "Above 0: mend the mount that the log names; restart engines that started without it.",
    ),
    gauge(
        "load_tokens_per_second",
        "tokens per second",
        "Load speed as the cost model measured it.",
        "Low: run `kvferry bench io`.",
    ),
    gauge(
        "prefill_tokens_per_second",
        "tokens per second",
        "Prefill speed as the cost model measured it.",
        "With the load speed: why loads are declined.",
    ),
    counter(
        "events",
        "chunks",
        "KV events of what this engine has stored: told as stored, as removed, or dropped, since"
        " the store was.",
        "Dropped: see why stores are.",
        outcome=("stored", "removed", "dropped"),
    ),
    counter(
        "identity_refusals",
        "",
        "Ranks or stores of another identity, refused.",
        "The engine's log names the field that differs.",
    ),
    counter(
        "namespace_resets",
        "",
        "Cache resets and weight updates, after which the namespace is private or new.",
        "Set `weights_id` to share again after an update.",
    ),
    gauge(
        "standing_aside",
        "",
        "1 after an internal error: the engine serves on without kvferry.",
        "Alert on it. Restart the engine, and report the error in its log.",
    ),
    counter(
        "internal_errors",
        "",
        "Errors that are kvferry's own fault.",
        "Report the error in the engine's log.",
        where=("facade", "planner", "jobs", "runner"),
    ),
)

METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        *_LOOKUPS,
        *_LOADS,
        *_STORES,
        *_CATALOG,
        *_SPACE,
        *TRANSFER,
        *_CONDITION,
        *EXPORTER,
    )
}
