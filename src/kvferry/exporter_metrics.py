"""The metrics of `kvferry exporter`: a part of the table in `metric_table`."""

from kvferry.metric import ANY, counter, gauge

_OF_NAMESPACE = {"namespace": ANY, "model": ANY}
_OF_TENANT = {"tenant": ANY}

EXPORTER = (
    gauge(
        "exporter_up",
        "",
        "1 if the store and its catalog answered lately. While it is 0 only this metric, the age"
        " and the refusals are shown.",
        "Alert on it. The exporter says the reason on its standard error; engines run as without"
        " a cache.",
    ),
    gauge(
        "exporter_sample_age_seconds",
        "seconds",
        "Age of the figures shown.",
        "Above a minute: the catalog or the store's file system hangs.",
    ),
    gauge(
        "exporter_engines",
        "engines",
        "Engines alive: processes that hold the store. Not shown until all that hold it were seen"
        " to live or not, some 10 s after the start.",
        "Fewer than were started: one died, or its catalog does not answer it.",
    ),
    gauge(
        "exporter_capacity_bytes", "bytes", "Budget of the store.", "`kvferry resize` changes it."
    ),
    gauge(
        "exporter_used_bytes", "bytes", "What its segments take of that.", "At capacity: normal."
    ),
    gauge(
        "exporter_disk_free_bytes",
        "bytes",
        "Free on the file system of the store.",
        "Less than capacity less used: the disk will be full before the store is. Free space, or"
        " `kvferry resize`.",
    ),
    gauge(
        "exporter_segments",
        "segments",
        "Segments of a namespace.",
        "Moves between models: they compete.",
        **_OF_NAMESPACE,
    ),
    gauge(
        "exporter_pages",
        "pages",
        "Pages of a namespace that can be found.",
        "None.",
        **_OF_NAMESPACE,
    ),
    gauge(
        "exporter_page_bytes",
        "bytes",
        "What these pages take.",
        "Which model fills the store.",
        **_OF_NAMESPACE,
    ),
    gauge(
        "exporter_reserved_slots",
        "slots",
        "Slots of a namespace that are leased to writers.",
        "Steady without stores: each engine keeps `reserve_ahead_count`. Growing: writers are slow"
        " or die.",
        **_OF_NAMESPACE,
    ),
    gauge(
        "exporter_graced_slots",
        "slots",
        "Slots of a namespace that were evicted or given up and wait to be used again.",
        "Many for long: evictions are ahead of stores.",
        **_OF_NAMESPACE,
    ),
    counter(
        "exporter_lookup_chunks",
        "chunks",
        "Chunks that engines looked up in a namespace.",
        "The denominator of its hit rate.",
        **_OF_NAMESPACE,
    ),
    counter(
        "exporter_hit_chunks",
        "chunks",
        "Of these, chunks that were found.",
        "Hit rate = hit chunks / lookup chunks. Falls after evictions: raise the capacity.",
        **_OF_NAMESPACE,
    ),
    gauge(
        "exporter_tenant_segments",
        "segments",
        "Segments of a tenant.",
        "Times the segment size: what it takes of its limits.",
        **_OF_TENANT,
    ),
    gauge(
        "exporter_tenant_page_bytes",
        "bytes",
        "What the pages take that a tenant stored.",
        "Which tenant fills the store.",
        **_OF_TENANT,
    ),
    gauge(
        "exporter_tenant_guaranteed_bytes",
        "bytes",
        "What others cannot take from a tenant.",
        "`kvferry limit` changes it.",
        **_OF_TENANT,
    ),
    gauge(
        "exporter_tenant_maximum_bytes",
        "bytes",
        "What a tenant never has more than; the capacity, if it has no maximum.",
        "`kvferry limit` changes it.",
        **_OF_TENANT,
    ),
    counter(
        "exporter_quota_evictions",
        "pages",
        "Of the evictions, pages that went for a quota: at a maximum, above one, or to give back"
        " what is guaranteed.",
        "Steady: a tenant wants more than its maximum.",
    ),
    counter(
        "exporter_pages_lapsed",
        "pages",
        "Of the evictions, pages that nobody had used for their time to live.",
        "None: `kvferry limit` set it.",
    ),
    counter(
        "exporter_quota_refusals",
        "requests",
        "Times the store did not grow for a tenant or namespace at its maximum, or since others are"
        " still to get what they are guaranteed.",
        "As above.",
    ),
    counter("exporter_published", "pages", "Pages that became visible.", "None."),
    counter(
        "exporter_duplicates",
        "pages",
        "Pages that another engine had published before.",
        "Many: engines compute the same prefixes at once; route by prefix.",
    ),
    counter(
        "exporter_evictions",
        "pages",
        "Pages evicted to make room.",
        "Many, with a falling hit rate: `kvferry resize` to more.",
    ),
    counter(
        "exporter_reservations_expired",
        "slots",
        "Reservations whose writer never came back.",
        "Follows a crash. Steady: storage is slower than `reservation_lease_s`.",
    ),
    counter(
        "exporter_requests_refused",
        "requests",
        "What came to the exporter's port and was not answered. `malformed`: not HTTP; `token`:"
        " without the token; `host`: under another name than loopback has, where no token is"
        " asked; `unknown`: no such page; `busy`: too many connections; `slow`: no request within"
        " the time.",
        "`token` steadily: the scraper has another token. Others: somebody scans the port.",
        reason=("malformed", "token", "host", "unknown", "busy", "slow"),
    ),
)
