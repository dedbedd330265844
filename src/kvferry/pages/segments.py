"""The folder of a store: its superblock and its segment files (docs/formats.md).

    superblock.json      what the store was made with; the first to create it wins
    segments/<8 hex>.seg one header block, then slots; preallocated, of one namespace
    roots.json           the further roots of the store, in its home alone
    limits.json          what tenants and namespaces may have of it, in its home alone (`limits`)
    owner.<8 hex>        which catalog hands out the slots (`owner`)
    *.tmp                half-made files; removed by whoever opens the store, when old

Every file appears under its name only when it is complete. Files have mode 0600, folders 0700.
What is read here is checked: a segment without an intact header of this store does not exist.
"""

import errno
import logging
import mmap
import os
import re
import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated

import msgspec

from kvferry.clock import Clock
from kvferry.errors import ConfigError, IncompatibleError, UnavailableError
from kvferry.layout import HEADER_BYTES, Address, PageGeometry
from kvferry.pages import files, header, mounts
from kvferry.pages.base import FoundPage, Outcome, SegmentFacts, StoreFacts, slot_offset_bytes
from kvferry.pages.facts import Asked, decide, require_agreement, segment_facts
from kvferry.pages.limits import check_limits, read_limits

log = logging.getLogger(__name__)

SUPERBLOCK = "superblock.json"
ROOTS = "roots.json"
SUPERBLOCK_FORMAT = "kvferry store"
SUPERBLOCK_VERSION = 1  # 1: the first
SEGMENT_MAGIC = b"kvfseg\x00\x00"
SEGMENT_VERSION = 1  # 1: the first

_SEGMENT_FIELDS = struct.Struct("<8sII16s32sIIQII")
_SEGMENT_NAME = re.compile(r"([0-9a-f]{8})\.seg")


PositiveBytes = Annotated[int, msgspec.Meta(gt=0)]


class Superblock(msgspec.Struct, frozen=True, omit_defaults=True):
    """superblock.json. Sizes in bytes; `created_wall_s` is for people. `is_further`: a root of a
    store that has another home."""

    format: str
    version: int
    store_id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    capacity_bytes: PositiveBytes
    alignment_bytes: PositiveBytes
    segment_bytes: PositiveBytes
    created_wall_s: float
    is_further: bool = False

    def facts(self) -> StoreFacts:
        store_id = bytes.fromhex(self.store_id)
        return StoreFacts(store_id, self.capacity_bytes, self.alignment_bytes, self.segment_bytes)


class SegmentFiles:
    """The files of one store. `is_sparse`: segments get their length but no blocks, and count by
    their length; so it is on 3FS in any case, which has no preallocation. `open` first; afterwards
    any thread may call. Nothing is held open, so there is nothing to close. Raises as
    `files.system_errors` says."""

    def __init__(
        self,
        root: Path,
        asked: Asked,
        clock: Clock,
        digest: header.Digest,
        *,
        is_sparse: bool = False,
    ):
        self._root = root
        self._is_sparse = is_sparse
        self._segments = root / "segments"
        self._asked = asked
        self._clock = clock
        self._digest = digest
        self.facts: StoreFacts | None = None

    def open(self) -> StoreFacts:
        """Finds the store or makes it, and removes what others left half-made."""
        with files.system_errors("use the store", self._root):
            if not self._asked.may_create and read_superblock(self._root) is None:
                raise UnavailableError(
                    "pages.root",
                    f"{self._root} is no root of the store now: is it mounted? If it is to begin"
                    f" anew, take it out of {ROOTS} in the first root",
                )
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._is_sparse = self._is_sparse or mounts.is_on_3fs(self._root)
            superblock = read_superblock(self._root) or self._create_superblock()
            require_agreement(superblock.facts(), self._asked, str(self._root))
            self._require_home(superblock)
            self._segments.mkdir(mode=0o700, exist_ok=True)
            self.facts = superblock.facts()
            self._sweep()
        return self.facts

    def path(self, segment: int) -> Path:
        """Where a segment is."""
        return self._segments / f"{segment:08x}.seg"

    def create(self, segment: int, namespace: bytes, geometry: PageGeometry) -> None:
        """Preallocates a segment. Idempotent; IncompatibleError if there is another one."""
        facts = segment_facts(self.facts, segment, namespace, geometry)
        target = self.path(segment)
        with files.system_errors("create", target):
            self._require_root()
            found = self.read(segment)
            if found is Outcome.CORRUPT:
                target.unlink(missing_ok=True)
            if found in (Outcome.CORRUPT, Outcome.ABSENT):
                self._create(target, facts)
                found = self.read(segment)
        if found != facts:
            raise IncompatibleError(
                "pages.segment",
                f"segment {segment} is there already, of another namespace, geometry or version",
                found=found,
                wanted=facts,
            )

    def delete(self, segment: int) -> None:
        """Removes a segment. Its space is given back even while others hold the file open."""
        target = self.path(segment)
        with files.system_errors("delete", target):
            self._require_root()
            try:
                descriptor = os.open(target, os.O_WRONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return
            try:
                target.unlink(missing_ok=True)
                os.ftruncate(descriptor, 0)
            finally:
                os.close(descriptor)

    def has(self, segment: int) -> bool:
        """Whether there is a file of this number. Raises UnavailableError if the root is gone."""
        path = self.path(segment)
        with files.system_errors("look for", path):
            is_there = path.exists()
            if not is_there:
                self._require_root()
        return is_there

    def all_facts(self) -> list[SegmentFacts]:
        """All segments with an intact header, by number."""
        with files.system_errors("list", self._segments):
            found = [self.read(number) for number in sorted(self._numbers())]
        return [facts for facts in found if isinstance(facts, SegmentFacts)]

    def read(self, segment: int) -> SegmentFacts | Outcome:
        """What a segment says of itself, or as `open_file` why it cannot be used."""
        opened = self.open_file(segment, os.O_RDONLY)
        if isinstance(opened, Outcome):
            return opened
        os.close(opened[0])
        return opened[1]

    def open_file(self, segment: int, flags: int) -> tuple[int, SegmentFacts] | Outcome:
        """A descriptor, which is the caller's to close, and what the file says. Or ABSENT: not
        there; CORRUPT: not intact; FOREIGN: of another store or version. Raises OSError."""
        try:
            descriptor = os.open(self.path(segment), flags | os.O_CLOEXEC)
        except FileNotFoundError:
            self._require_root()
            return Outcome.ABSENT
        try:
            facts = self._inspect(_read_block(descriptor, 0), segment)
            if facts is Outcome.FOREIGN:
                self._require_root()
        except OSError:
            os.close(descriptor)
            raise
        if isinstance(facts, Outcome):
            os.close(descriptor)
            return facts
        return descriptor, facts

    def scan(self, segment: int) -> Iterator[FoundPage]:
        """The pages of a segment whose slices all have intact headers of one generation."""
        with files.system_errors("scan", self.path(segment)):
            opened = self.open_file(segment, os.O_RDONLY)
            if isinstance(opened, Outcome):
                return
            descriptor, facts = opened
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
                for slot in range(facts.slot_count):
                    blocks = self._header_blocks(descriptor, facts, slot)
                    page = header.page_of(blocks, facts, self._digest)
                    if page is not None:
                        yield FoundPage(page, Address(segment, slot))
            finally:
                os.close(descriptor)

    def used_bytes(self) -> int:
        """What is allocated to all files of the store, half-made ones included."""
        with files.system_errors("measure", self._root):
            taken_bytes = {}
            for folder in (self._root, self._segments):
                for entry in os.scandir(folder):
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue
                    taken_bytes[status.st_ino] = (
                        status.st_size if self._is_sparse else 512 * status.st_blocks
                    )
            return sum(taken_bytes.values())

    def _require_home(self, superblock: Superblock) -> None:
        """Two engines with different homes would not see each other's word, and both own all."""
        if superblock.is_further and self._asked.store_id is None:
            raise ConfigError(
                "pages.home",
                f"{self._root} is a further root of a store: name the store's first root first, as"
                " all its engines do",
            )

    def _require_root(self) -> None:
        """Raises OSError if the folder is not the store's any more: its mount is gone, or another
        one is there. What is not in it is not absent then, and nothing in it is ours."""
        try:
            superblock = read_superblock(self._root)
        except ConfigError:
            superblock = None
        if superblock is None or superblock.facts().store_id != self.facts.store_id:
            raise OSError(errno.ESTALE, "this is not the store's folder any more: is it mounted?")

    def _numbers(self) -> list[int]:
        names = (_SEGMENT_NAME.fullmatch(entry.name) for entry in os.scandir(self._segments))
        return [int(name[1], 16) for name in names if name]

    def _create_superblock(self) -> Superblock:
        facts = decide(self._asked, self._clock.random_bytes(16))
        superblock = Superblock(
            SUPERBLOCK_FORMAT,
            SUPERBLOCK_VERSION,
            facts.store_id.hex(),
            facts.capacity_bytes,
            facts.alignment_bytes,
            facts.segment_bytes,
            self._clock.wall_s(),
            is_further=self._asked.store_id is not None,
        )
        files.create_file(self._root / SUPERBLOCK, _encode(superblock), self._clock)
        return read_superblock(self._root)

    def _create(self, target: Path, facts: SegmentFacts) -> None:
        temporary = files.temporary_beside(target, self._clock)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            descriptor = os.open(temporary, flags, 0o600)
            try:
                if self._is_sparse:
                    os.ftruncate(descriptor, self.facts.segment_bytes)
                else:
                    os.posix_fallocate(descriptor, 0, self.facts.segment_bytes)
                os.pwrite(descriptor, pack_segment_header(facts, self.facts, self._digest), 0)
            finally:
                os.close(descriptor)
            files.publish(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    def _sweep(self) -> None:
        try:
            for folder in (self._root, self._segments):
                for path in files.old_files(folder, ".tmp", self._clock):
                    path.unlink(missing_ok=True)
            for path in files.old_files(self._segments, ".seg", self._clock):
                name = _SEGMENT_NAME.fullmatch(path.name)
                if name and self.read(int(name[1], 16)) is Outcome.CORRUPT:
                    path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("cannot tidy up %s: %s", self._root, error)

    def _inspect(self, block: bytes, segment: int) -> SegmentFacts | Outcome:
        if len(block) < HEADER_BYTES or not header.is_intact(block, self._digest):
            return Outcome.CORRUPT
        magic, version, length_bytes, store_id, *fields = _SEGMENT_FIELDS.unpack_from(block)
        known = (SEGMENT_MAGIC, SEGMENT_VERSION, HEADER_BYTES, self.facts.store_id)
        facts = _segment_facts(*fields)
        same = (magic, version, length_bytes, store_id) == known and facts.segment == segment
        return facts if same else Outcome.FOREIGN

    def _header_blocks(self, descriptor: int, facts: SegmentFacts, slot: int) -> Iterator[bytes]:
        start = slot_offset_bytes(self.facts, facts.geometry, slot)
        for index in range(facts.geometry.slice_count):
            block = _read_block(descriptor, start + index * facts.geometry.slice_bytes)
            yield block.ljust(HEADER_BYTES, b"\0")


def read_superblock(root: Path) -> Superblock | None:
    """The superblock of a store; None if there is no store. Raises ConfigError if it is damaged
    or of a later version."""
    path = root / SUPERBLOCK
    try:
        superblock = msgspec.json.decode(path.read_bytes(), type=Superblock)
    except FileNotFoundError:
        return None
    except msgspec.DecodeError as error:
        raise ConfigError(
            "pages.superblock",
            f"{path} is damaged: empty the folder (it is a cache), or use another one",
            reason=str(error),
        ) from error
    if (superblock.format, superblock.version) != (SUPERBLOCK_FORMAT, SUPERBLOCK_VERSION):
        raise ConfigError(
            "pages.superblock_version",
            f"{path} is of version {superblock.version}, this kvferry knows {SUPERBLOCK_VERSION}: "
            "upgrade kvferry, or use another folder",
        )
    return superblock


def known_roots(home: Path) -> set[str]:
    """Folders that have been further roots of this store. Raises as `files.system_errors` says."""
    with files.system_errors("read", home / ROOTS):
        try:
            return set(msgspec.json.decode((home / ROOTS).read_bytes(), type=list[str]))
        except FileNotFoundError:
            return set()
        except msgspec.DecodeError:
            return set()  # a hint: an empty folder in place of a mount is then taken for a new root


def remember_roots(home: Path, roots: Collection[str], clock: Clock) -> None:
    """Adds to them."""
    known = known_roots(home)
    if not known.issuperset(roots):
        with files.system_errors("write", home / ROOTS):
            content = msgspec.json.encode(sorted(known.union(roots)))
            files.replace_file(home / ROOTS, content, clock)


def resize(root: Path, capacity_bytes: int, clock: Clock) -> StoreFacts:
    """Gives a store another capacity, and returns its facts. No engine may be using it: they
    take the capacity in when they start. A smaller one takes effect as the catalog evicts."""
    with files.system_errors("resize", root):
        superblock = read_superblock(root)
        if superblock is None:
            raise ConfigError("pages.no_store", f"there is no store in {root}")
        resized = msgspec.structs.replace(superblock, capacity_bytes=capacity_bytes)
        if capacity_bytes < superblock.segment_bytes:
            raise ConfigError(
                "pages.capacity",
                f"capacity_bytes {capacity_bytes} is less than one segment of the store, "
                f"{superblock.segment_bytes} bytes",
            )
        check_limits(read_limits(root), resized.facts())
        files.replace_file(root / SUPERBLOCK, _encode(resized), clock)
    return resized.facts()


def pack_segment_header(segment: SegmentFacts, store: StoreFacts, digest: header.Digest) -> bytes:
    """The first 4,096 bytes of a segment file."""
    geometry = segment.geometry
    block = _SEGMENT_FIELDS.pack(
        SEGMENT_MAGIC,
        SEGMENT_VERSION,
        HEADER_BYTES,
        store.store_id,
        segment.namespace,
        segment.segment,
        geometry.slice_count,
        geometry.payload_bytes,
        geometry.chunk_tokens,
        segment.slot_count,
    )
    return header.seal(bytearray(block), digest)


def _segment_facts(
    namespace: bytes,
    segment: int,
    slice_count: int,
    payload_bytes: int,
    *counts: int,
) -> SegmentFacts:
    chunk_tokens, slot_count = counts
    geometry = PageGeometry(slice_count, payload_bytes, chunk_tokens)
    return SegmentFacts(segment, namespace, geometry, slot_count)


def _read_block(descriptor: int, offset_bytes: int) -> bytes:
    """4,096 bytes or what is left, through memory that direct I/O accepts."""
    with mmap.mmap(-1, HEADER_BYTES) as block:
        return block[: os.preadv(descriptor, [block], offset_bytes)]


def _encode(superblock: Superblock) -> bytes:
    return msgspec.json.format(msgspec.json.encode(superblock), indent=1) + b"\n"
