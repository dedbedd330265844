"""Namespaces, shares and quotas in the tables of LMDB, inside one transaction."""

from collections.abc import Sequence

from kvferry.catalog.base import ATTACH_STEP_S, Quota, Share, Space, check_space, unknown_namespace
from kvferry.catalog.lmdb_environment import Tables
from kvferry.catalog.lmdb_records import (
    SpaceRow,
    number_key,
    pack_quota,
    unpack_number,
    unpack_quota,
)
from kvferry.catalog.quotas import QuotaRow, renewed


class LmdbSpaces:
    """What was read is remembered; `flush` writes what was learned. A share has a number from its
    first segment on."""

    def __init__(self, tables: Tables, now_s: float):
        self._tables = tables
        self._now_s = now_s
        self._rows: dict[bytes, SpaceRow | None] = {}
        self._learned: set[bytes] = set()
        self._shares: dict[Share, int | None] = {}

    def flush(self) -> None:
        for row in filter(None, map(self._rows.get, self._learned)):
            self._tables.spaces.put(row.space.namespace, row.pack())

    # Namespaces.

    def get(self, namespace: bytes) -> SpaceRow | None:
        if namespace not in self._rows:
            packed = self._tables.spaces.get(namespace)
            self._rows[namespace] = packed and SpaceRow.unpack(namespace, packed)
        return self._rows[namespace]

    def known(self, namespace: bytes) -> SpaceRow:
        row = self.get(namespace)
        if row is None:
            raise unknown_namespace(namespace)
        return row

    def all(self) -> list[SpaceRow]:
        return [SpaceRow.unpack(key, value) for key, value in self._tables.spaces.scan()]

    def is_attached(self, space: Space) -> bool:
        """True if `attach` would change nothing."""
        row = self.get(space.namespace)
        if row is None:
            return False
        check_space(row.space, space)
        return self._now_s < row.attached_s + ATTACH_STEP_S

    def attach(self, space: Space, number: int) -> bool:
        """`number`: for a new one. Returns whether it was used."""
        if self.is_attached(space):
            return False
        known = self.get(space.namespace)
        row = known or SpaceRow(number, space, self._now_s)
        row = row._replace(attached_s=self._now_s)
        self._rows[space.namespace] = row
        self._tables.spaces.put(space.namespace, row.pack())
        return known is None

    def learn(self, row: SpaceRow) -> None:
        """In place of the row that there was."""
        namespace = row.space.namespace
        if row is not self._rows[namespace]:
            self._rows[namespace] = row
            self._learned.add(namespace)

    def forget(self, namespace: bytes) -> None:
        """With its shares, none of which has a segment."""
        self._tables.spaces.delete(namespace)
        self._rows[namespace] = None
        for key, _ in self._tables.shares.scan(namespace):
            self._tables.shares.delete(key)
        self._shares.clear()

    # Shares.

    def share(self, share: Share) -> int | None:
        """Its number; None: it has never had a segment."""
        if share not in self._shares:
            packed = self._tables.shares.get(share.namespace + share.tenant)
            self._shares[share] = unpack_number(packed) if packed else None
        return self._shares[share]

    def add_share(self, share: Share, number: int) -> bool:
        """`number`: for a new one. Returns whether it was used."""
        if self.share(share) is not None:
            return False
        self._tables.shares.put(share.namespace + share.tenant, number_key(number))
        self._shares[share] = number
        return True

    def shares(self, namespace: bytes) -> list[int]:
        """Numbers of the shares of a namespace."""
        return [unpack_number(packed) for _, packed in self._tables.shares.scan(namespace)]

    # Quotas.

    def quotas(self) -> dict[bytes, QuotaRow]:
        return {owner: unpack_quota(packed) for owner, packed in self._tables.quotas.scan()}

    def set_quotas(self, quotas: Sequence[Quota]) -> None:
        rows = renewed(self.quotas(), quotas)
        self._tables.quotas.clear()
        for owner, row in rows.items():
            self._tables.quotas.put(owner, pack_quota(row))

    def claim(self, owner: bytes, until_s: float) -> None:
        row = self.quotas()[owner]._replace(claimed_until_s=until_s)
        self._tables.quotas.put(owner, pack_quota(row))
