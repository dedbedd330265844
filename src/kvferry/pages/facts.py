"""What a store is made with, once, and how a configuration must agree with it afterwards."""

from dataclasses import dataclass

from kvferry.errors import ConfigError
from kvferry.layout import PageGeometry, round_up
from kvferry.pages.base import SegmentFacts, StoreFacts, slot_count

SEGMENT_BYTES_MAX = 4 << 30
_SLOTS_MIN = 4


@dataclass(frozen=True, slots=True)
class Asked:
    """What the configuration says; None: whatever the store was made with, or the default.

    `page_bytes`: the largest page that the caller will store, if known when the store is made.
    `store_id`: of the store that a further root belongs to. `may_create` False: it is there, or
    its mount is missing.
    """

    capacity_bytes: int | None = None
    alignment_bytes: int | None = None
    segment_bytes: int | None = None
    page_bytes: int = 0
    store_id: bytes | None = None
    may_create: bool = True


def default_segment_bytes(capacity_bytes: int, alignment_bytes: int, page_bytes: int) -> int:
    """A 64th of the capacity, at least 256 MiB (but not more than a 16th of the capacity, so that
    space can move between namespaces), at most 4 GiB; enough for 4 slots of `page_bytes` in any
    case. A multiple of the alignment."""
    wanted_bytes = max(capacity_bytes // 64, min(256 << 20, capacity_bytes // 16))
    wanted_bytes = min(wanted_bytes, SEGMENT_BYTES_MAX)
    wanted_bytes -= wanted_bytes % alignment_bytes
    slots_bytes = _SLOTS_MIN * round_up(page_bytes, alignment_bytes)
    return max(wanted_bytes, alignment_bytes + max(slots_bytes, alignment_bytes))


def decide(asked: Asked, store_id: bytes) -> StoreFacts:
    """The facts of a new store; `store_id` is its id if none was asked for. Raises ConfigError
    where they make none."""
    capacity_bytes = asked.capacity_bytes
    if capacity_bytes is None:
        raise ConfigError(
            "pages.no_capacity",
            "there is no store yet: capacity_bytes is needed to create it",
        )
    alignment_bytes = asked.alignment_bytes or 4096
    if alignment_bytes < 4096 or alignment_bytes & (alignment_bytes - 1):
        raise ConfigError(
            "pages.alignment",
            f"alignment_bytes must be a power of two of at least 4096, not {alignment_bytes}",
        )
    segment_bytes = asked.segment_bytes or default_segment_bytes(
        capacity_bytes, alignment_bytes, asked.page_bytes
    )
    if segment_bytes % alignment_bytes or not 0 < segment_bytes <= capacity_bytes:
        raise ConfigError(
            "pages.segment_bytes",
            f"capacity_bytes {capacity_bytes} must hold one segment: {segment_bytes} bytes, "
            f"a multiple of alignment_bytes {alignment_bytes}: raise capacity_bytes, or mend "
            "segment_bytes",
        )
    return StoreFacts(asked.store_id or store_id, capacity_bytes, alignment_bytes, segment_bytes)


def require_agreement(facts: StoreFacts, asked: Asked, where: str) -> None:
    """Raises ConfigError for the first field in which a store is not what was asked for."""
    if asked.store_id not in (None, facts.store_id):
        raise ConfigError(
            "pages.store_id",
            f"{where} is a root of another store, {facts.store_id.hex()}: empty the folder, or name"
            " another one",
        )
    if asked.capacity_bytes not in (None, facts.capacity_bytes):
        raise ConfigError(
            "pages.capacity",
            f"capacity_bytes is {asked.capacity_bytes} here and {facts.capacity_bytes} in the "
            f"store {where}: make them equal, or change the store with `kvferry resize`",
        )
    for name in ("alignment_bytes", "segment_bytes"):
        wanted, found = getattr(asked, name), getattr(facts, name)
        if wanted not in (None, found):
            raise ConfigError(
                f"pages.{name}",
                f"{name} is {wanted} here and {found} in the store {where}, where it was fixed "
                f"when the store was made: set {name} to {found}, or use another folder",
            )


def segment_facts(
    facts: StoreFacts, segment: int, namespace: bytes, geometry: PageGeometry
) -> SegmentFacts:
    """The facts of a new segment. Raises ConfigError if not even one page fits."""
    count = slot_count(facts, geometry)
    if count < 1:
        raise ConfigError(
            "pages.page_too_large",
            f"a page has {geometry.page_bytes} bytes, a segment {facts.segment_bytes}: use "
            "smaller chunks (chunk_tokens), or a new store with a larger segment_bytes",
        )
    return SegmentFacts(segment, namespace, geometry, count)
