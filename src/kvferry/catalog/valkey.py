"""The catalog on a Valkey server: for any number of engines on any number of hosts.

The rules run inside the server, as functions (`valkey_rules/`): each call is atomic and one round
trip for a batch of bounded size; a longer one is split. Time is the server's. What several stores
have on one server lies side by side, each under its own keys. Counters of lookups are kept in the
process and told with its next writing call.

A server that was restarted, or another that took its place, may have lost some records or all of
them: each call raises UnavailableError with kind `catalog.lost` until the catalog is opened again,
which makes a new one, with another `catalog_id`, where there is none.
"""

import logging
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

from kvferry.catalog import valkey_records as records
from kvferry.catalog.base import (
    DEFAULT_POLICY,
    GRACE_S,
    HOTTEST_MAX,
    LOST,
    NO_TENANT,
    PACKED_HIT,
    CatalogStats,
    Commit,
    Hit,
    HotPage,
    Page,
    Policy,
    Quota,
    Refused,
    Slot,
    Space,
    Swept,
    Verdict,
    Want,
    check_segment_bytes,
    check_space,
    unknown_namespace,
)
from kvferry.catalog.lookup_counts import Counts, LookupCounts
from kvferry.catalog.snapshot import SegmentEntry, Snapshot
from kvferry.catalog.valkey_library import library
from kvferry.catalog.valkey_link import FULL, Link
from kvferry.clock import Clock
from kvferry.errors import (
    ClosedError,
    ConfigError,
    ExhaustedError,
    InternalError,
    UnavailableError,
)
from kvferry.layout import Address
from kvferry.server_url import ServerUrl

log = logging.getLogger(__name__)

T = TypeVar("T")

LOOKUP_KEYS_MAX = 8192
BATCH_MAX = 1024
"""Slots, commits or pages in one call."""
AUDIT_SLOTS_MAX = 65536

_HIT = struct.Struct(f"{PACKED_HIT.size}s")

NO_GENERATION = bytes(16)
MISS = bytes(PACKED_HIT.size)
OK = ord("K")
NO_COUNTS: Counts = {}
_VERDICTS = {
    ord("P"): Verdict.PUBLISHED,
    ord("A"): Verdict.PARTIAL,
    ord("D"): Verdict.DUPLICATE,
    ord("E"): Verdict.EXPIRED,
}
_REFUSALS = {b"": Refused.BUDGET, b"B": Refused.BUDGET, b"Q": Refused.QUOTA}
"""Nothing is said where the server's memory is full."""


class _Opened(NamedTuple):
    """`root`: the key that the names of all keys of the store begin with."""

    root: bytes
    catalog_id: bytes


class ValkeyCatalog:
    """See the module and the contract. `is_guest`: opens only what is there."""

    def __init__(
        self,
        server: ServerUrl,
        clock: Clock,
        grace_s: float = GRACE_S,
        *,
        link: Link | None = None,
        is_guest: bool = False,
        policy: Policy = DEFAULT_POLICY,
    ):
        self.catalog_id = b""
        self._clock = clock
        self._grace_s = grace_s
        self._is_guest = is_guest
        self._policy = policy
        self._link = link or Link(server, clock, library())
        self._opened: _Opened | None = None
        self._counts = LookupCounts()
        self._is_full = False

    def open(self, store_id: bytes, capacity_bytes: int, segment_bytes: int) -> bool:
        self.close()
        self._link.open()
        try:
            root = b"{kvferry:%s}" % store_id.hex().encode()
            said = self._open(root, b"", capacity_bytes, segment_bytes)
            is_new = said[0] == ord("L")
            if is_new and self._is_guest:
                raise UnavailableError(
                    "catalog.absent", f"{self._link.name} has no catalog of this store"
                )
            if is_new:
                new_id = self._clock.random_bytes(16)
                said = self._open(root, new_id, capacity_bytes, segment_bytes)
                is_new = said[1:] == new_id  # else: another process was quicker
            self._check_opened(said, segment_bytes)
        except BaseException:
            self._link.close()
            raise
        self.catalog_id = said[1:]
        self._opened = _Opened(root, self.catalog_id)
        return is_new

    def _open(self, root: bytes, new_id: bytes, capacity_bytes: int, segment_bytes: int) -> bytes:
        return self._link.call("open", root, new_id, capacity_bytes, segment_bytes)

    def _check_opened(self, said: bytes, segment_bytes: int) -> None:
        if said[0] == ord("S"):
            check_segment_bytes(int(said[1:]), segment_bytes)
        if said[0] != OK:
            raise ConfigError(
                "catalog.format",
                f"the catalog on {self._link.name} is of another version of kvferry: name another"
                " server or database, or update the engines that use it",
                version=said[1:].decode(),
            )

    def close(self) -> None:
        self._opened = None
        self._link.close()

    # Calls.

    def _read(self, function: str, *arguments: Any) -> Any:
        """The answer of a function that changes nothing."""
        opened = self._require()
        said = self._link.call(function, opened.root, opened.catalog_id, *arguments)
        self._check(said[0] if isinstance(said, bytes) else said[0][0], b"")
        return said[1:]

    def _write(self, function: str, *arguments: Any, once: bool = False, namespace=b"") -> bytes:
        """`once`: if the reply is lost and it is asked again, the same reply comes. `namespace`:
        for the error."""
        counts = self._counts.pending()
        said = self._change(function, arguments, once, counts, namespace)
        if said[0] == OK:  # else the function changed nothing
            self._counts.told(counts)
        return said

    def _write_if_room(self, function: str, namespace: bytes, *arguments: Any) -> bytes:
        """As `_write`, once. Nothing more than OK where the server's memory is full: then there is
        no room, and all else goes on."""
        try:
            said = self._write(function, namespace, *arguments, once=True, namespace=namespace)
        except UnavailableError as error:
            if error.kind != FULL:
                raise
            if not self._is_full:
                log.warning("nothing new is stored: %s", error.message)
            self._is_full = True
            return bytes([OK])
        self._is_full = False
        return said

    def _change(
        self,
        function: str,
        arguments: Sequence[Any],
        once: bool = False,
        counts: Counts = NO_COUNTS,
        namespace: bytes = b"",
    ) -> bytes:
        opened = self._require()
        header = records.pack_header(self._grace_s, self._policy, counts)
        operation = self._link.operation() if once else b""
        said = self._link.call(
            function, opened.root, opened.catalog_id, header, operation, *arguments
        )
        self._check(said[0], namespace)
        return said

    def _require(self) -> _Opened:
        if self._opened is None:
            raise ClosedError("catalog.closed", "the catalog is closed", server=self._link.name)
        return self._opened

    def _check(self, status: int, namespace: bytes) -> None:
        """Raises for what is an error whatever was asked."""
        if status == ord("L"):
            raise UnavailableError(LOST, f"{self._link.name} has lost the catalog: open it again")
        if status == ord("U"):
            raise unknown_namespace(namespace)
        if status == ord("B"):
            raise InternalError("catalog.slices", "slices are outside the page")

    # Verbs.

    def lookup(self, namespace: bytes, keys: Sequence[bytes]) -> list[Hit | None]:
        return [
            None if generation == NO_GENERATION else Hit(Address(segment, slot), generation)
            for segment, slot, generation in PACKED_HIT.iter_unpack(
                self.lookup_packed(namespace, keys)
            )
        ]

    def lookup_packed(self, namespace: bytes, keys: Sequence[bytes]) -> bytes:
        hits = self._hits(namespace, keys)
        miss_count = sum(map(MISS.__eq__, _each_hit(hits)))
        self._counts.add(namespace, len(keys), len(keys) - miss_count)
        return hits

    def present(self, namespace: bytes, keys: Sequence[bytes]) -> list[bool]:
        return [hit != MISS for hit in _each_hit(self._hits(namespace, keys))]

    def _hits(self, namespace: bytes, keys: Sequence[bytes]) -> bytes:
        hits = b"".join(
            self._read("lookup", namespace, b"".join(part))
            for part in _parts(keys, LOOKUP_KEYS_MAX)
        )
        if len(hits) != len(keys) * PACKED_HIT.size:
            raise ValueError("not an answer for each key")
        return hits

    def attach(self, space: Space) -> None:
        sizes = records.pack_sizes(space)
        said = self._change("attach", (space.namespace, sizes, space.description.encode()))
        if said[0] != OK:
            check_space(records.sized_space(space.namespace, said[1:]), space)

    def reserve(
        self, namespace: bytes, count: int, lease_s: float, tenant: bytes = NO_TENANT
    ) -> list[Slot]:
        minted = self._clock.random_bytes(16 * count)
        slots: list[Slot] = []
        for first in range(0, max(count, 1), BATCH_MAX):
            generations = minted[16 * first : 16 * (first + BATCH_MAX)]
            packed = records.LEASE.pack(lease_s) + generations
            said = self._write_if_room("reserve", namespace, tenant, packed)
            slots += records.unpack_slots(said[1:])
            if len(slots) < min(first + BATCH_MAX, count):
                break
        return slots

    def commit(self, namespace: bytes, commits: Sequence[Commit]) -> list[Verdict]:
        verdicts: list[Verdict] = []
        for part in _parts(commits, BATCH_MAX):
            said = self._write("commit", namespace, records.pack_commits(part))
            if len(said) != 1 + len(part):
                raise ValueError("not a verdict for each commit")
            verdicts += map(_VERDICTS.__getitem__, said[1:])
        return verdicts

    def abort(self, namespace: bytes, slots: Sequence[Slot]) -> None:
        for part in _parts(slots, BATCH_MAX):
            self._write("abort", records.pack_slots(part))

    def touch(self, namespace: bytes, keys: Sequence[bytes]) -> None:
        for part in _parts(keys, LOOKUP_KEYS_MAX):
            self._change("touch", (namespace, b"".join(part)))

    def evict(self, namespace: bytes, pages: Sequence[tuple[bytes, bytes]]) -> int:
        evicted_count = 0
        for part in _parts(pages, BATCH_MAX):
            packed = b"".join(key + generation for key, generation in part)
            said = self._write("evict", namespace, packed, once=True)
            evicted_count += records.NUMBER.unpack(said[1:])[0]
        return evicted_count

    def sweep(self, wanted: Sequence[Want] = (), can_grow: bool = True) -> Swept:
        said = self._write("sweep", records.pack_wanted(wanted), b"1" if can_grow else b"0")
        expired_count, evicted_count, *why = records.SWEPT.unpack_from(said, 1)
        numbers = records.unpack_numbers(said[1 + records.SWEPT.size :])
        return Swept(expired_count, evicted_count, numbers, *why)

    def grow(self, namespace: bytes, tenant: bytes = NO_TENANT) -> int | Refused:
        said = self._write_if_room("grow", namespace, tenant)[1:]
        return _REFUSALS.get(said) or records.NUMBER.unpack(said)[0]

    def grown(self, segment: int) -> bool:
        return self._write("grown", records.NUMBER.pack(segment))[1:] == b"1"

    def shrunk(self, segment: int) -> None:
        self._write("shrunk", records.NUMBER.pack(segment))

    def adopt(
        self, segment: int, namespace: bytes, pages: Sequence[Page], tenant: bytes = NO_TENANT
    ) -> int:
        own = [page for page in pages if page.address.segment == segment]
        taken_count = 0
        for index, part in enumerate(_parts(own, BATCH_MAX) or [[]]):
            packed = records.ADOPTED.pack(segment, index == 0) + records.pack_found(part)
            said = self._write("adopt", namespace, tenant, packed, once=True, namespace=namespace)
            if said[0] == ord("N"):
                raise ExhaustedError(
                    "catalog.capacity", "the budget does not hold this segment", segment=segment
                )
            count, goes_on = records.ADOPTED.unpack(said[1:])
            taken_count += count
            if not goes_on:
                break
        return taken_count

    def set_quotas(self, quotas: Sequence[Quota]) -> None:
        self._write("set_quotas", records.pack_quotas(quotas))

    def stats(self) -> CatalogStats:
        return self._counts.added_to(records.read_stats(*self._read("stats")))

    def hottest(self, namespace: bytes, count: int) -> list[HotPage]:
        return records.unpack_hottest(self._read("hottest", namespace, min(count, HOTTEST_MAX)))

    def segments(self) -> dict[int, SegmentEntry]:
        (fields,) = self._read("segments")
        return {int(name): records.unpack_segment(row) for name, row in records.pairs(fields)}

    def snapshot(self) -> Snapshot:
        """Of one moment where the segments have at most `AUDIT_SLOTS_MAX` slots together; else
        each segment is."""
        audit = records.Audit()
        while not audit.add(self._read("audit", audit.last_segment, AUDIT_SLOTS_MAX)):
            pass
        return audit.snapshot()


def _parts(items: Sequence[T], count_max: int) -> list[Sequence[T]]:
    return [items[first : first + count_max] for first in range(0, len(items), count_max)]


def _each_hit(hits: bytes) -> Iterator[bytes]:
    return (hit for (hit,) in _HIT.iter_unpack(hits))
