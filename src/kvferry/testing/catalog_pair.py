"""A catalog and its model side by side: told the same, they answer the same and know the same.

`Pair` says each verb to both and compares answers, errors and snapshots. Two drivers choose the
verbs: `CatalogMachine` (hypothesis: small cases, shrunk when they fail) and `random_life` (seeded:
long lives). Keys come from small trees of prefixes, so that chains share parents and collide.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvferry.catalog.base import (
    DEFAULT_POLICY,
    EVERYBODY,
    NO_TENANT,
    Catalog,
    Commit,
    Page,
    Policy,
    Quota,
    Slot,
    Space,
    Want,
)
from kvferry.catalog.memory import MemoryCatalog
from kvferry.catalog.snapshot import check_invariants
from kvferry.errors import Error
from kvferry.layout import Address
from kvferry.testing.clock import ManualClock
from kvferry.testing.guarantees import pushed_below

STORE = b"s" * 16
SEGMENT_BYTES = 1 << 20
ROOT = bytes(32)
SPACES = (
    Space(b"a" * 32, slot_count=4, slot_bytes=1000, slice_count=1, chunk_tokens=16, description=""),
    Space(b"b" * 32, slot_count=3, slot_bytes=2000, slice_count=3, chunk_tokens=32, description=""),
    Space(b"c" * 32, slot_count=9, slot_bytes=1500, slice_count=2, chunk_tokens=16, description=""),
)
TENANTS = (NO_TENANT, b"t" * 16, b"u" * 16)
QUOTAS = (
    (),
    (Quota(TENANTS[1], 2),),
    (Quota(TENANTS[1], 2, 2, 30.0), Quota(TENANTS[2], 1), Quota(EVERYBODY, ttl_s=600.0)),
    (Quota(SPACES[0].namespace, 1, 3), Quota(TENANTS[1], 1), Quota(TENANTS[2], 0, 1, 5.0)),
    (Quota(SPACES[1].namespace, 0, 2), Quota(TENANTS[0], 2), Quota(SPACES[2].namespace, 1)),
)
ADVANCES_S = (0.25, 5.0, 10.0, 31.0, 61.0, 700.0, 90_000.0)
LEASES_S = (1.0, 30.0, 300.0)
PATH_DEPTH = 5


def path_keys(path: Sequence[int]) -> list[bytes]:
    """The chain of keys along a path of branches in a tree of prefixes."""
    keys, key = [], ROOT
    for branch in path:
        key = hashlib.sha256(key + bytes([branch])).digest()
        keys.append(key)
    return keys


class Pair:
    """See the module. `make`: a catalog over a clock, not open; `policy`: its own."""

    def __init__(
        self,
        make: Callable[[ManualClock], Catalog],
        seed: int,
        segments_max: int = 4,
        policy: Policy = DEFAULT_POLICY,
    ):
        self._clocks = (ManualClock(seed), ManualClock(seed))
        self._catalogs = (make(self._clocks[0]), MemoryCatalog(self._clocks[1], policy=policy))
        self._capacity_bytes = segments_max * SEGMENT_BYTES
        self.held: list[tuple[bytes, Slot]] = []  # whatever was ever reserved, lately
        self.open()

    def _both(self, verb: str, *arguments: Any) -> Any:
        """The answer of both; an error is an answer."""
        answers = [_answer(getattr(catalog, verb), arguments) for catalog in self._catalogs]
        assert answers[0] == answers[1], (verb, arguments)
        return answers[0]

    def reaches(self) -> set[float]:
        """What the namespaces have learned from pages that came back."""
        return {reach for reach, _, _ in self._catalogs[1].snapshot().recalls.values()}

    def check(self) -> None:
        """Both know the same, and it makes sense."""
        snapshots = [catalog.snapshot() for catalog in self._catalogs]
        assert snapshots[0] == snapshots[1]
        assert check_invariants(snapshots[0]) == []
        assert self._catalogs[0].catalog_id == self._catalogs[1].catalog_id

    def open(self) -> None:
        self._both("open", STORE, self._capacity_bytes, SEGMENT_BYTES)

    def close(self) -> None:
        self._both("close")

    def reopen(self) -> None:
        self.close()
        self.open()

    def advance(self, duration_s: float) -> None:
        for clock in self._clocks:
            clock.advance(duration_s)

    def attach(self, space: int) -> None:
        self._both("attach", SPACES[space])

    def grow(self, space: int, is_grown: bool, tenant: int = 0) -> None:
        number = self._both("grow", SPACES[space].namespace, TENANTS[tenant])
        if is_grown and isinstance(number, int):
            self._both("grown", number)

    def grown(self, index: int) -> None:
        """Says it of one of the segments that there are, or of the next."""
        self._both("grown", self._some_segment(index))

    def shrunk(self, index: int) -> None:
        self._both("shrunk", self._some_segment(index))

    def _some_segment(self, index: int) -> int:
        numbers = sorted(self._both("segments"))
        numbers.append(numbers[-1] + 1 if numbers else 0)
        return numbers[index % len(numbers)]

    def reserve(self, space: int, count: int, lease_s: float, tenant: int = 0) -> None:
        namespace = SPACES[space].namespace
        slots = self._both("reserve", namespace, count, lease_s, TENANTS[tenant])
        if isinstance(slots, list):
            self.held = [*self.held, *((namespace, slot) for slot in slots)][-24:]

    def commit(self, index: int, path: Sequence[int], first_slice: int, slice_count: int) -> None:
        """Commits the last chunk of a path to a slot reserved lately."""
        if self.held:
            namespace, slot = self.held[index % len(self.held)]
            self._both("commit", namespace, [_commit(path, slot, first_slice, slice_count)])

    def store(self, space: int, path: Sequence[int], tenant: int = 0) -> None:
        """A whole chain in one call, as a worker would."""
        namespace, slice_count = SPACES[space].namespace, SPACES[space].slice_count
        slots = self._both("reserve", namespace, len(path), 30.0, TENANTS[tenant])
        if isinstance(slots, list):
            commits = [_commit(path[: i + 1], slot, 0, slice_count) for i, slot in enumerate(slots)]
            self._both("commit", namespace, commits)

    def abort(self, indices: Sequence[int]) -> None:
        for index in indices:
            if self.held:
                namespace, slot = self.held[index % len(self.held)]
                self._both("abort", namespace, [slot])

    def touch(self, space: int, path: Sequence[int]) -> None:
        self._both("touch", SPACES[space].namespace, path_keys(path))

    def lookup(self, space: int, path: Sequence[int]) -> None:
        namespace, keys = SPACES[space].namespace, path_keys(path)
        self._both("lookup", namespace, keys)
        self._both("lookup_packed", namespace, keys)
        self._both("present", namespace, keys)
        self._both("hottest", namespace, 4)

    def evict(self, space: int, path: Sequence[int]) -> None:
        """The last chunk of a path, if it is there."""
        namespace, key = SPACES[space].namespace, path_keys(path)[-1]
        (hit,) = self._both("lookup", namespace, [key])
        self._both("evict", namespace, [(key, hit.generation if hit else bytes(16))])

    def sweep(self, wanted: Sequence[tuple[int, int, int]], can_grow: bool) -> None:
        named = [
            Want(SPACES[space].namespace, count, TENANTS[tenant]) for space, count, tenant in wanted
        ]
        before = self._catalogs[1].snapshot()
        swept = self._both("sweep", named, can_grow)
        assert pushed_below(before, self._catalogs[1].snapshot(), named, swept) == []
        for number in swept.deletable_segments[::2]:  # whoever should delete the others died
            self._both("shrunk", number)

    def set_quotas(self, index: int) -> None:
        self._both("set_quotas", QUOTAS[index])

    def adopt(self, space: int, segment: int, path: Sequence[int], tenant: int = 0) -> None:
        keys = path_keys(path)
        pages = [
            Page(key, parent, i, Address(segment, i), bytes([i + 1, segment % 256]) * 8)
            for i, (key, parent) in enumerate(zip(keys, [ROOT, *keys], strict=False))
        ]
        self._both("adopt", segment, SPACES[space].namespace, pages, TENANTS[tenant])

    def stats(self) -> None:
        self._both("stats")
        self._both("segments")


def _answer(verb: Callable, arguments: Sequence[Any]) -> Any:
    try:
        return verb(*arguments)
    except Error as error:
        return error.kind


def _commit(path: Sequence[int], slot: Slot, first_slice: int, slice_count: int) -> Commit:
    keys = [ROOT, *path_keys(path)]
    return Commit(keys[-1], keys[-2], len(path) - 1, slot, first_slice, slice_count)


_spaces = st.integers(0, len(SPACES) - 1)
_paths = st.lists(st.integers(0, 1), min_size=1, max_size=PATH_DEPTH)
_tenants = st.integers(0, len(TENANTS) - 1)
_indices = st.integers(0, 23)
_segments = st.integers(0, 7)


class CatalogMachine(RuleBasedStateMachine):
    """A subclass defines `make(clock)`: a catalog that is not open."""

    @initialize(seed=st.integers(0, 3))
    def begin(self, seed):
        self.pair = Pair(self.make, seed)
        for space in range(2):
            self.pair.attach(space)
            self.pair.grow(space, True, tenant=space)

    def make(self, clock: ManualClock) -> Catalog:
        raise NotImplementedError

    @rule(index=st.integers(0, len(QUOTAS) - 1))
    def set_quotas(self, index):
        self.pair.set_quotas(index)

    @rule(space=_spaces, is_grown=st.booleans(), tenant=_tenants)
    def grow(self, space, is_grown, tenant):
        self.pair.grow(space, is_grown, tenant)

    @rule(space=_spaces)
    def attach(self, space):
        self.pair.attach(space)

    @rule(index=_indices)
    def grown(self, index):
        self.pair.grown(index)

    @rule(index=_indices)
    def shrunk(self, index):
        self.pair.shrunk(index)

    @rule(
        space=_spaces,
        count=st.integers(0, 6),
        lease_s=st.sampled_from(LEASES_S),
        tenant=_tenants,
    )
    def reserve(self, space, count, lease_s, tenant):
        self.pair.reserve(space, count, lease_s, tenant)

    @rule(index=_indices, path=_paths, first=st.integers(0, 2), count=st.integers(1, 3))
    def commit(self, index, path, first, count):
        self.pair.commit(index, path, first, count)

    @rule(space=_spaces, path=_paths, tenant=_tenants)
    def store(self, space, path, tenant):
        self.pair.store(space, path, tenant)

    @rule(indices=st.lists(_indices, max_size=3))
    def abort(self, indices):
        self.pair.abort(indices)

    @rule(space=_spaces, path=_paths)
    def touch(self, space, path):
        self.pair.touch(space, path)

    @rule(space=_spaces, path=_paths)
    def lookup(self, space, path):
        self.pair.lookup(space, path)

    @rule(space=_spaces, path=_paths)
    def evict(self, space, path):
        self.pair.evict(space, path)

    @rule(
        wanted=st.lists(st.tuples(_spaces, st.integers(0, 12), _tenants), max_size=2),
        can_grow=st.booleans(),
    )
    def sweep(self, wanted, can_grow):
        self.pair.sweep(wanted, can_grow)

    @rule(space=_spaces, segment=_segments, path=_paths, tenant=_tenants)
    def adopt(self, space, segment, path, tenant):
        self.pair.adopt(space, segment, path, tenant)

    @rule(duration_s=st.sampled_from(ADVANCES_S))
    def advance(self, duration_s):
        self.pair.advance(duration_s)

    @rule()
    def reopen(self):
        self.pair.reopen()

    @invariant()
    def same(self):
        if hasattr(self, "pair"):
            self.pair.check()
            self.pair.stats()

    def teardown(self):
        if hasattr(self, "pair"):
            self.pair.close()


def random_life(pair: Pair, seed: int, step_count: int, check_every: int = 50) -> dict[str, int]:
    """A long life of a pair. Returns how often each verb was said."""
    chance = random.Random(seed)

    def space() -> int:
        return chance.randrange(len(SPACES))

    def path() -> list[int]:
        return [chance.randrange(3) for _ in range(chance.randint(1, PATH_DEPTH))]

    def tenant() -> int:
        return chance.choice((0, 0, 1, 1, 2))

    def wants() -> list[tuple[int, int, int]]:
        count = chance.choice((1, 1, 1, 2))
        return [(space(), chance.randint(0, 12), tenant()) for _ in range(count)]

    verbs: dict[Callable, tuple[int, Callable[[], tuple]]] = {
        pair.attach: (2, lambda: (space(),)),
        pair.grow: (6, lambda: (space(), chance.random() < 0.9, tenant())),
        pair.grown: (2, lambda: (chance.randrange(100),)),
        pair.shrunk: (1, lambda: (chance.randrange(100),)),
        pair.reserve: (
            10,
            lambda: (space(), chance.randint(0, 6), chance.choice(LEASES_S), tenant()),
        ),
        pair.commit: (20, lambda: (chance.randrange(24), path(), 0, chance.randint(1, 3))),
        pair.store: (20, lambda: (space(), path(), tenant())),
        pair.abort: (3, lambda: ([chance.randrange(24)],)),
        pair.touch: (10, lambda: (space(), path())),
        pair.lookup: (10, lambda: (space(), path())),
        pair.evict: (5, lambda: (space(), path())),
        pair.sweep: (12, lambda: (wants(), chance.random() < 0.8)),
        pair.set_quotas: (1, lambda: (chance.randrange(len(QUOTAS)),)),
        pair.adopt: (1, lambda: (space(), chance.randrange(2000), path(), tenant())),
        pair.advance: (12, lambda: (chance.choice(ADVANCES_S[:-2]),)),
        pair.stats: (1, lambda: ()),
        pair.reopen: (1, lambda: ()),
    }
    said = dict.fromkeys((verb.__name__ for verb in verbs), 0)
    weights = [weight for weight, _ in verbs.values()]
    for step, verb in enumerate(chance.choices(list(verbs), weights, k=step_count)):
        verb(*verbs[verb][1]())
        said[verb.__name__] += 1
        if step % check_every == 0:
            pair.check()
    pair.check()
    return said
