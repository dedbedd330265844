"""Checks of the folder that pages are to lie in, and of its catalog. They change nothing there
but a probe file that is gone when they are done."""

import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvferry import server_url
from kvferry.catalog.open import open_url as open_catalog
from kvferry.cli.finding import Finding, State, failed, passed, warning
from kvferry.cli.opened import open_store
from kvferry.cli.output import size_text
from kvferry.clock import SystemClock
from kvferry.config import Config, split_url
from kvferry.errors import ConfigError, Error, UnavailableError
from kvferry.pages import mounts
from kvferry.pages.segments import Superblock, read_superblock

PROBE_BYTES = 4096


def check_store(config: Config) -> Iterator[Finding]:
    """Everything about the store that a configuration names."""
    scheme, path = split_url(config.home)
    if scheme == "memory":
        yield warning("pages", config.home, "for tests only: use posix:///path")
        return
    root = Path(path).resolve()
    folder = nearest_folder(root)
    try:
        superblock = read_superblock(root)
    except ConfigError as error:
        yield failed("store", str(root), error.message)
        return
    except OSError as error:
        yield failed("store", f"{root}: {error.strerror}", f"give user {os.geteuid()} the folder")
        return
    yield from _check_superblock(config, root, superblock)
    if scheme == "usrbio":
        findings = list(_usrbio_findings(config, root))
        yield from findings
        if any(finding.state is State.FAILED for finding in findings):
            return
    else:
        yield _check_file_system(folder)
        yield from check_rights(folder, config.direct_io)
    for url in config.roots[1:]:
        further = nearest_folder(Path(split_url(url).path).resolve())
        yield _check_file_system(further)
        yield from check_rights(further, config.direct_io)
    catalog = _check_catalog_folder(config, superblock)
    yield catalog
    if superblock is not None and catalog.state is not State.FAILED:
        yield _check_opens(config)


def nearest_folder(root: Path) -> Path:
    """The folder itself, or the one that it would be made in."""
    return next(folder for folder in (root, *root.parents) if folder.is_dir())


def _usrbio_findings(config: Config, root: Path) -> Iterator[Finding]:
    try:
        from kvferry.cli.usrbio_checks import check_usrbio  # noqa: PLC0415 - needs native code
    except ImportError as error:
        yield failed("3FS library", str(error), "install kvferry again: it has no native extension")
        return
    yield from check_usrbio(config, root)


def _check_superblock(config: Config, root: Path, found: Superblock | None) -> Iterator[Finding]:
    if found is not None:
        yield _check_capacity(config.capacity_bytes, found.capacity_bytes)
    elif config.capacity_bytes is None:
        cure = 'set capacity_bytes, such as "200GiB": it is needed to create the store'
        yield warning("store", f"none in {root} yet", cure)
    else:
        yield passed("store", f"will be made in {root}")
        yield _check_room(config.capacity_bytes, shutil.disk_usage(nearest_folder(root)).free)


def _check_capacity(asked_bytes: int | None, found_bytes: int) -> Finding:
    detail = f"there, capacity {size_text(found_bytes)}"
    if asked_bytes in (None, found_bytes):
        return passed("store", detail)
    cure = f"set capacity_bytes to {found_bytes}, leave it out, or run kvferry resize"
    return failed("store", f"{detail}, configured {size_text(asked_bytes)}", cure)


def _check_room(capacity_bytes: int, free_bytes: int) -> Finding:
    detail = f"{size_text(free_bytes)} free, capacity {size_text(capacity_bytes)}"
    if free_bytes >= capacity_bytes:
        return passed("free space", detail)
    return warning("free space", detail, "lower capacity_bytes, or free space: stores would stop")


def _check_file_system(folder: Path) -> Finding:
    kind = mounts.mount_of(folder, mounts.current_mounts()).kind
    if kind in mounts.USERSPACE_3FS:
        return warning("file system", kind, "through FUSE; usrbio:// is faster")
    if kind in mounts.IN_MEMORY:
        return warning("file system", kind, "pages are gone after a restart, and take host memory")
    if kind in mounts.IN_CONTAINER:
        return warning("file system", kind, "inside the container: mount a volume there")
    return passed("file system", kind)


def check_rights(folder: Path, direct_io: str) -> Iterator[Finding]:
    """Writes a probe file, and again past the page cache."""
    try:
        descriptor, name = tempfile.mkstemp(suffix=".tmp", dir=folder)
    except OSError as error:
        cure = f"give user {os.geteuid()} a folder that it can write"
        yield failed("rights", f"{folder}: {error.strerror}", cure)
        return
    try:
        os.write(descriptor, bytes(PROBE_BYTES))
        yield passed("rights", f"{folder} can be written")
        yield _check_direct_io(name, direct_io)
    except OSError as error:
        yield failed("rights", f"{folder}: {error.strerror}", "free space, or use another folder")
    finally:
        os.close(descriptor)
        os.unlink(name)


def _check_direct_io(name: str, direct_io: str) -> Finding:
    with mmap.mmap(-1, PROBE_BYTES) as buffer:
        try:
            descriptor = os.open(name, os.O_RDWR | os.O_DIRECT)
            try:
                os.pwrite(descriptor, buffer, 0)
                os.preadv(descriptor, [buffer], 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            detail = f"refused: {error.strerror}"
            if direct_io == "on":
                cure = 'set direct_io to "auto", or use a file system that has it'
                return failed("direct I/O", detail, cure)
            cure = "slower, and takes host memory: use a file system that has it"
            return warning("direct I/O", detail, cure)
    return passed("direct I/O", "works")


def _check_catalog_folder(config: Config, superblock: Superblock | None) -> Finding:
    """The embedded catalog is memory-mapped: that is not safe on a shared file system."""
    store_id = bytes.fromhex(superblock.store_id) if superblock else bytes(16)
    url = config.catalog_url(store_id)
    scheme, path = split_url(url)
    if server_url.is_server(url):
        return _check_server(url, superblock)
    if scheme != "lmdb":
        return warning("catalog", scheme, "for tests only: leave the key catalog out")
    folder = nearest_folder(Path(path).resolve())
    kind = mounts.mount_of(folder, mounts.current_mounts()).kind
    if kind in mounts.NETWORK:
        cure = 'name a folder on a local disk: "catalog": "lmdb:///path"'
        return failed("catalog", f"{path} is on {kind}", cure)
    if not os.access(folder, os.W_OK | os.X_OK):
        cure = f"give user {os.geteuid()} the folder, or name another one with catalog"
        return failed("catalog", f"{folder} cannot be written", cure)
    return passed("catalog", f"{path if superblock else folder} ({kind})")


def _check_server(url: str, superblock: Superblock | None) -> Finding:
    """Whether an engine could open the catalog; one that is not there is not made."""
    facts = superblock.facts() if superblock else None
    name = server_url.shown(url)
    try:
        catalog = open_catalog(url, SystemClock(), is_guest=True)
        catalog.open(
            facts.store_id if facts else bytes(16),
            facts.capacity_bytes if facts else 1 << 30,
            facts.segment_bytes if facts else 1 << 20,
        )
    except UnavailableError as error:
        if error.kind == "catalog.absent":
            return passed("catalog", f"{name} answers; it has no catalog of this store yet")
        cure = "start it, or mend the URL: engines run without a cache until it answers"
        return failed("catalog", error.message, cure)
    except Error as error:
        return failed("catalog", error.message, "mend this before the engine starts")
    catalog.close()
    return passed("catalog", name)


def _check_opens(config: Config) -> Finding:
    """As `kvferry status` would, beside the engines that use them."""
    try:
        with open_store(config) as store:
            if store.catalog is None:
                return passed("opens", "the store; no catalog on this host yet")
            page_count = sum(space.page_count for space in store.catalog.stats().spaces)
            return passed("opens", f"store and catalog, {page_count} pages")
    except Error as error:
        return failed("opens", error.message, "mend this before the engine starts")
