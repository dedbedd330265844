"""The LMDB environment of an embedded catalog: opening, trusting, sharing, growing.

A folder holds `data.mdb`, LMDB's `lock.mdb`, and `in-use`: a lock that every process with the
catalog open holds shared, and in it the boot under which the catalog is written. Commits are not
flushed to disk one by one, since the catalog can be rebuilt from the pages; what the system's
crash may have torn is therefore not opened again:

- The first process to come (it gets the lock exclusively) finds `in-use` empty: the last one to
  leave has flushed everything. Or the present boot: processes were killed, the system was not.
  Else the file is set aside and the catalog starts empty. So it does if LMDB can't read it.
- Whoever meets damage later writes that into `in-use`, for the next first one. So does who finds
  the file shorter than it was: to look past its end would kill the process.

LMDB must not be open twice in one process, so catalogs of one process share an environment: the
table of open ones is the one piece of global state, and LMDB's own. A process that was forked from
one that has a catalog open cannot use it, and LMDB does not let it open the same one again.

Any thread may call. Write transactions exclude each other across processes, and the lock of a
process that was killed inside one is taken over by the next.
"""

import fcntl
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import repeat
from pathlib import Path
from typing import TypeVar

import lmdb

from kvferry.catalog.lmdb_records import TABLES
from kvferry.clock import Clock
from kvferry.errors import ClosedError, ConfigError, UnavailableError

T = TypeVar("T")

MAP_BYTES = 1 << 30
"""First size of the memory map; it doubles as needed. Some 3 million pages fit."""
READERS_MAX = 512
LOCK_WAIT_S = 5.0
RETRIES_MAX = 40
DAMAGED = b"damaged"
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_log = logging.getLogger(__name__)
_open_environments: dict[tuple[int, str], "Environment"] = {}
_open_lock = threading.Lock()

_DAMAGE = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.VersionMismatchError,
    lmdb.IncompatibleError,
)


def boot_id() -> bytes:
    """16 bytes that name this run of the system."""
    return bytes.fromhex(BOOT_ID.read_text().strip().replace("-", ""))


def acquire(folder: Path, clock: Clock, map_bytes: int = MAP_BYTES) -> "Environment":
    """The environment in `folder`, made if need be. Each call needs one `release`. Raises
    ConfigError where the folder cannot be used, UnavailableError where that may pass."""
    with _open_lock:
        name = (os.getpid(), os.path.realpath(folder))
        environment = _open_environments.get(name)
        if environment is None:
            environment = Environment(folder, clock, map_bytes)
            environment.open()
            _open_environments[name] = environment
        environment.user_count += 1
        return environment


def release(environment: "Environment") -> None:
    """The last one closes it."""
    with _open_lock:
        environment.user_count -= 1
        if environment.user_count == 0:
            name = (os.getpid(), os.path.realpath(environment.folder))
            if _open_environments.pop(name, None) is not None:  # else: forked since, not ours
                environment.close()


class Table:
    """One table inside one transaction."""

    __slots__ = ("_database", "_transaction")

    def __init__(self, transaction: lmdb.Transaction, database: lmdb._Database):
        self._transaction = transaction
        self._database = database

    def get(self, key: bytes) -> bytes | None:
        return self._transaction.get(key, db=self._database)

    def put(self, key: bytes, value: bytes = b"") -> None:
        self._transaction.put(key, value, db=self._database)

    def delete(self, key: bytes) -> bool:
        return self._transaction.delete(key, db=self._database)

    def first(self, prefix: bytes = b"") -> tuple[bytes, bytes] | None:
        """The first record whose key starts with `prefix`."""
        with self._transaction.cursor(self._database) as cursor:
            if cursor.set_range(prefix) if prefix else cursor.first():
                key, value = cursor.item()
                return (key, value) if key.startswith(prefix) else None
        return None

    def scan(self, prefix: bytes = b"", count_max: int | None = None) -> list[tuple[bytes, bytes]]:
        """Records whose keys start with `prefix`, in order. A list: the table may change then."""
        found = []
        with self._transaction.cursor(self._database) as cursor:
            more = cursor.set_range(prefix) if prefix else cursor.first()
            while more and (count_max is None or len(found) < count_max):
                key, value = cursor.item()
                if not key.startswith(prefix):
                    break
                found.append((key, value))
                more = cursor.next()
        return found

    def last(self, prefix: bytes, count_max: int) -> list[bytes]:
        """Keys that start with `prefix`, the last one first. `prefix` is a number, as `number_key`
        packs it."""
        end = (int.from_bytes(prefix, "big") + 1).to_bytes(len(prefix), "big")
        keys = []
        with self._transaction.cursor(self._database) as cursor:
            more = cursor.prev() if cursor.set_range(end) else cursor.last()
            while more and len(keys) < count_max and cursor.key().startswith(prefix):
                keys.append(cursor.key())
                more = cursor.prev()
        return keys

    def count(self) -> int:
        return self._transaction.stat(self._database)["entries"]

    def clear(self) -> None:
        self._transaction.drop(self._database, delete=False)


class Tables:
    """A `Table` for each name in `lmdb_records.TABLES`, inside one transaction."""

    def __init__(self, transaction: lmdb.Transaction, databases: Mapping[str, lmdb._Database]):
        self._transaction = transaction
        self.meta = Table(transaction, databases["meta"])
        self.spaces = Table(transaction, databases["spaces"])
        self.shares = Table(transaction, databases["shares"])
        self.quotas = Table(transaction, databases["quotas"])
        self.segments = Table(transaction, databases["segments"])
        self.slots = Table(transaction, databases["slots"])
        self.free = Table(transaction, databases["free"])
        self.timers = Table(transaction, databases["timers"])
        self.pages = Table(transaction, databases["pages"])
        self.cold = Table(transaction, databases["cold"])
        self.ghosts = Table(transaction, databases["ghosts"])

    def clear(self) -> None:
        for table in (self.meta, self.spaces, self.shares, self.quotas, self.segments):
            table.clear()
        for table in (self.slots, self.free, self.timers, self.pages, self.cold, self.ghosts):
            table.clear()

    def page_values(self, keys: Iterable[bytes], default: bytes) -> Iterator[bytes]:
        """Values in `pages`. LMDB lets go of the GIL at every key; `Cursor.getmulti` would do so
        three times."""
        return map(self._transaction.get, keys, repeat(default))


class Environment:
    """See the module. Made by `acquire` only."""

    def __init__(self, folder: Path, clock: Clock, map_bytes: int):
        self.folder = folder
        self.user_count = 0
        self._clock = clock
        self._map_bytes = map_bytes
        self._process_id = os.getpid()
        self._descriptor = -1
        self._data_descriptor = -1
        self._data_bytes = 0
        self._lmdb: lmdb.Environment | None = None
        self._databases: dict[str, lmdb._Database] = {}
        self._changed = threading.Condition()
        self._transaction_count = 0
        self._is_resizing = False

    # Opening and trusting.

    def open(self) -> None:
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self.folder / "in-use"
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                "catalog.folder",
                f"the catalog's folder cannot be used: {error.strerror}. Name a folder on a local"
                " disk that this process may write to",
                folder=str(self.folder),
            ) from error
        try:
            if self._lock(fcntl.LOCK_EX):
                self._open_as_first()
            else:
                self._wait_for_lock()
                self._open_lmdb()
        except lmdb.Error as error:
            self._close_descriptor()
            raise UnavailableError(
                "catalog.lmdb",
                f"the catalog cannot be opened: {error}",
                folder=str(self.folder),
            ) from error
        except (OSError, UnavailableError):
            self._close_descriptor()
            raise

    def _open_as_first(self) -> None:
        boot = boot_id()
        mark = os.pread(self._descriptor, 16, 0)
        if mark not in (b"", boot):
            self._set_aside("it was damaged" if mark == DAMAGED else "the system stopped suddenly")
        self._pad()
        try:
            self._open_lmdb()
        except _DAMAGE as error:
            self._set_aside(str(error))
            self._open_lmdb()
        self._mark(boot)
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def _lock(self, kind: int) -> bool:
        try:
            fcntl.flock(self._descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _wait_for_lock(self) -> None:
        """Whoever came first is opening."""
        end_s = self._clock.now_s() + LOCK_WAIT_S
        while not self._lock(fcntl.LOCK_SH):
            if self._clock.now_s() >= end_s:
                raise UnavailableError(
                    "catalog.locked",
                    "another process does not finish opening the catalog",
                    folder=str(self.folder),
                )
            self._clock.sleep(0.01)
        if os.pread(self._descriptor, 16, 0) == b"":  # who left meanwhile thought it was the last
            self._mark(boot_id())

    def _mark(self, mark: bytes) -> None:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, mark, 0)
        os.fsync(self._descriptor)

    def _set_aside(self, reason: str) -> None:
        data = self.folder / "data.mdb"
        _log.warning("the catalog %s starts empty: %s", data, reason)
        (self.folder / "lock.mdb").unlink(missing_ok=True)
        if data.exists():
            data.replace(self.folder / "set-aside.mdb")

    def _pad(self) -> None:
        """Makes a file that was cut off as long as it says it is: LMDB then finds zeros, which it
        calls damage, where the system would kill the process for looking past the end."""
        data = self.folder / "data.mdb"
        if not data.exists():
            return
        try:
            with lmdb.open(str(self.folder), readonly=True, lock=False, map_size=1 << 20) as env:
                needed_bytes = (env.info()["last_pgno"] + 1) * env.stat()["psize"]
        except lmdb.Error:
            return  # `_open_lmdb` says the same, and is heard
        if data.stat().st_size < needed_bytes:
            os.truncate(data, needed_bytes)

    def _open_lmdb(self) -> None:
        self._lmdb = lmdb.open(
            str(self.folder),
            map_size=self._map_bytes,
            max_dbs=len(TABLES),
            max_readers=READERS_MAX,
            mode=0o600,
            sync=False,
            metasync=False,
            readahead=False,
        )
        try:
            self._lmdb.reader_check()
            self._databases = {
                name: self._retried(lambda name=name: self._lmdb.open_db(name.encode()))
                for name in TABLES
            }
            self._data_descriptor = os.open(self.folder / "data.mdb", os.O_RDONLY | os.O_CLOEXEC)
        except (lmdb.Error, OSError):
            self._lmdb.close()
            raise

    def close(self) -> None:
        """The last process to leave flushes everything. A call that hangs keeps it open."""
        if self._transaction_count:
            _log.warning("the catalog %s is left open: a call in it does not end", self.folder)
            return
        if self._lock(fcntl.LOCK_EX) and os.pread(self._descriptor, 16, 0) != DAMAGED:
            self._flush()
        self._lmdb.close()
        os.close(self._data_descriptor)
        self._close_descriptor()

    def _flush(self) -> None:
        try:
            self._lmdb.sync(True)
        except lmdb.Error as error:
            _log.warning("the catalog %s could not be flushed: %s", self.folder, error)
        else:
            self._mark(b"")

    def _close_descriptor(self) -> None:
        """A process that was forked meanwhile has it too, and must not keep the lock."""
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        os.close(self._descriptor)

    def _check_process(self) -> None:
        if os.getpid() != self._process_id:
            raise ClosedError(
                "catalog.forked",
                "the catalog is open in another process, which this one was forked from",
                folder=str(self.folder),
            )

    def is_shared(self) -> bool:
        """True if other processes, or other catalogs of this one, have it open."""
        self._check_process()
        is_alone = self.user_count == 1 and self._lock(fcntl.LOCK_EX)
        self._wait_for_lock()
        return not is_alone

    def clean_readers(self) -> None:
        """Ends the reads of processes that were killed: they would keep old states on disk."""
        self._check_process()
        with self._mapped_errors():
            self._lmdb.reader_check()

    # Transactions.

    def read(self, work: Callable[[Tables], T]) -> T:
        """`work` on one consistent state."""
        return self._transact(work, is_write=False)

    def write(self, work: Callable[[Tables], T]) -> T:
        """`work` in a transaction that other processes see whole, or not at all if it raises. It
        is called again if the map has to grow."""
        return self._transact(work, is_write=True)

    def _transact(self, work: Callable[[Tables], T], is_write: bool) -> T:
        self._check_process()

        def attempt() -> T:
            self._check_length()
            with (
                self._counted(),
                self._lmdb.begin(db=self._databases["pages"], write=is_write) as transaction,
            ):
                return work(Tables(transaction, self._databases))

        with self._mapped_errors():
            return self._retried(attempt)

    def _check_length(self) -> None:
        known_bytes = self._data_bytes  # first: other threads may make it longer meanwhile
        length_bytes = os.fstat(self._data_descriptor).st_size
        if length_bytes < known_bytes:
            raise lmdb.CorruptedError("data.mdb was cut off")
        self._data_bytes = length_bytes

    @contextmanager
    def _mapped_errors(self) -> Iterator[None]:
        try:
            yield
        except lmdb.Error as error:
            if isinstance(error, _DAMAGE):
                self._mark(DAMAGED)
            raise UnavailableError(
                "catalog.lmdb", f"LMDB: {error}", folder=str(self.folder)
            ) from error

    def _retried(self, attempt: Callable[[], T]) -> T:
        """Tries again with a larger map where this or another process needs one."""
        for _ in range(RETRIES_MAX):
            try:
                return attempt()
            except lmdb.MapResizedError:
                self._resize(0)  # to what the file says
            except lmdb.MapFullError:
                self._resize(2 * self._lmdb.info()["map_size"])
        return attempt()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Keeps the map in place while a transaction looks at it."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_resizing)
            self._transaction_count += 1
        try:
            yield
        finally:
            with self._changed:
                self._transaction_count -= 1
                self._changed.notify_all()

    def _resize(self, map_bytes: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._is_resizing)
            self._is_resizing = True
            try:
                self._changed.wait_for(lambda: self._transaction_count == 0)
                self._lmdb.set_mapsize(map_bytes)
            finally:
                self._is_resizing = False
                self._changed.notify_all()
