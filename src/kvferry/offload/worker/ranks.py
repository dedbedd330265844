"""One part on one rank: its place, its copier, and the namespace that its pages have now."""

from kvferry.device.base import Copier
from kvferry.layout import PageGeometry
from kvferry.offload.base import Chunk, LocalPart
from kvferry.pages.base import Extent, PageId


class RankPart:
    """Immutable: after a change of namespace there is a new one, and what is under way keeps its
    old one."""

    def __init__(self, local: LocalPart, copier: Copier, tenant: bytes, namespace: bytes):
        self.local = local
        self.copier = copier
        self.namespace = namespace
        self._tenant = tenant

    def renamed(self, namespace: bytes) -> "RankPart":
        return RankPart(self.local, self.copier, self._tenant, namespace)

    @property
    def place(self) -> tuple[int, int]:
        return self.local.part.stage, self.local.part.group_index

    @property
    def geometry(self) -> PageGeometry:
        return self.local.part.geometry

    @property
    def extent_bytes(self) -> int:
        return self.local.extent_bytes

    def page(self, chunk: Chunk) -> PageId:
        return PageId(
            self.namespace,
            chunk.key,
            chunk.parent,
            chunk.chunk_index,
            self.local.part.group,
            chunk.generation,
            self._tenant,
        )

    def extent(
        self, chunk: Chunk, staging_address: int, checksums: tuple[int, ...] | None = None
    ) -> Extent:
        """This rank's slices of a chunk's page, at a slot of staging. `checksums`: for a write. A
        read leaves the payloads to a copier that proves pages."""
        placement = self.local.placement
        return Extent(
            self.page(chunk),
            self.geometry,
            chunk.address,
            placement.first_slice,
            placement.slice_count,
            staging_address,
            checksums,
            verify_payload=not self.copier.proves_pages,
        )
