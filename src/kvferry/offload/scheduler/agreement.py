"""Who the ranks are: nothing is looked up or stored until all have said the same.

Only workers see strides and backends, so each rank sends its identity in its first report. One
thread: the scheduler's.
"""

import hashlib

from kvferry.errors import IncompatibleError
from kvferry.offload.base import Identity, Part


class Agreement:
    """Collects identities until `rank_count` ranks have agreed; then `parts` is set, and
    `namespaces`, the parts as a plan names them."""

    def __init__(self, rank_count: int, store_id: bytes):
        self._rank_count = rank_count
        self._store_id = store_id
        self._identities: dict[int, Identity] = {}
        self._name: bytes | None = None
        self.parts: tuple[Part, ...] = ()
        self.namespaces: tuple[tuple[int, int, bytes], ...] = ()

    def add(self, identity: Identity) -> bool:
        """True if this was the last one missing. Raises IncompatibleError naming the field."""
        if identity.rank in self._identities:
            return False
        self._check("rank_count", self._rank_count, identity.rank_count, identity.rank)
        self._check("store_id", self._store_id, identity.store_id, identity.rank)
        for other in self._identities.values():
            if other.stage == identity.stage:
                self._check_parts(other, identity)
        self._identities[identity.rank] = identity
        if len(self._identities) < self._rank_count:
            return False
        self._set(self._collect())
        return True

    def rename(self, name: bytes) -> None:
        """Gives every part another namespace, known to those who know `name` (32 random bytes, or
        a name that operators have agreed on)."""
        self._name = name
        self._set(self._collect() if self.parts else ())

    def _set(self, parts: tuple[Part, ...]) -> None:
        self.parts = parts
        self.namespaces = tuple((part.stage, part.group_index, part.namespace) for part in parts)

    def _collect(self) -> tuple[Part, ...]:
        by_place = {
            (part.stage, part.group_index): part
            for identity in self._identities.values()
            for part in identity.parts
        }
        return tuple(self._named(by_place[place]) for place in sorted(by_place))

    def _named(self, part: Part) -> Part:
        if self._name is None:
            return part
        digest = hashlib.sha256(b"kvferry renamed 1\x00" + part.namespace + self._name)
        values = {name: getattr(part, name) for name in part.__struct_fields__}
        return Part(**(values | {"namespace": digest.digest()}))

    def _check_parts(self, one: Identity, other: Identity) -> None:
        self._check("parts", len(one.parts), len(other.parts), other.rank)
        for ours, theirs in zip(one.parts, other.parts, strict=True):
            for name in ours.__struct_fields__:
                self._check(name, getattr(ours, name), getattr(theirs, name), other.rank)

    def _check(self, name: str, ours: object, theirs: object, rank: int) -> None:
        if ours != theirs:
            raise IncompatibleError(
                "ranks_disagree",
                f"rank {rank} says another {name} than the ranks before it: all ranks of an "
                "engine must run the same model, backend and store",
                field=name,
                ours=ours,
                theirs=theirs,
            )
