"""A store as an operator finds it, and the commands that show it, each in its own process."""

import hashlib
import http.client
import json
import re
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

from kvferry.catalog.base import Commit, Space
from kvferry.catalog.lmdb import LmdbCatalog
from kvferry.clock import SystemClock
from kvferry.config import child_environment
from kvferry.errors import UnavailableError
from kvferry.pages import memory
from kvferry.pages.facts import Asked
from kvferry.pages.owner import OWNER_LEASE_S, StoreOwnership
from kvferry.pages.segments import SegmentFiles

CLOCK = SystemClock()
ASKED = Asked(capacity_bytes=8 << 20, alignment_bytes=4096, segment_bytes=1 << 20)
MODEL_A, MODEL_B = "meta/Llama-8B", "qwen/Qwen3-0.6B"
TOKEN = "a token of the operators"


def space(letter, model, slot_bytes):
    slots = (ASKED.segment_bytes - 4096) // slot_bytes
    return Space(letter * 32, slots, slot_bytes, 1, 64, json.dumps({"model": model}))


A, B = space(b"a", MODEL_A, 65536), space(b"b", MODEL_B, 32768)


class Filled:
    """A store with a catalog in use: 30 pages of `A`, 4 of `B`; 40 chunks were looked up in `A`,
    of which 30 were found, and 8 in `B` of which none was. One of A's was evicted again."""

    def __init__(self, folder: Path, catalog=None):
        self.root, self.url = folder / "kv", f"lmdb://{folder}/catalog"
        files = SegmentFiles(self.root, ASKED, CLOCK, memory.digest)
        self.facts = files.open()
        self.catalog = catalog or LmdbCatalog(folder / "catalog", CLOCK)
        self.owner = None
        self._stop = threading.Event()
        self._beating = None

    def fill(self):
        self.catalog.open(self.facts.store_id, ASKED.capacity_bytes, ASKED.segment_bytes)
        for one, chains in ((A, {"system prompt": 20, "a book": 8, "hello": 3}), (B, {"x": 4})):
            self.catalog.attach(one)
            for _ in range(3 if one is A else 1):
                self.catalog.grown(self.catalog.grow(one.namespace))
            for name, count in chains.items():
                self.store(one, name, count)
        (hit,) = self.catalog.lookup(A.namespace, keys("hello", 3)[2:])
        self.catalog.evict(A.namespace, [(keys("hello", 3)[2], hit.generation)])
        self.look(A, "system prompt", 20)
        self.look(A, "a book", 8)
        self.look(A, "hello", 1)
        self.look(A, "nothing", 10)
        self.look(B, "nothing", 8)
        self.catalog.reserve(A.namespace, 5, 300.0)
        return self

    def store(self, one, name, count):
        names = keys(name, count)
        slots = self.catalog.reserve(one.namespace, count, 30.0)
        parents = [bytes(32), *names]
        self.catalog.commit(
            one.namespace,
            [Commit(names[i], parents[i], i, slot, 0, 1) for i, slot in enumerate(slots)],
        )

    def look(self, one, name, count):
        self.catalog.lookup(one.namespace, keys(name, count))
        self.catalog.sweep()

    def hold(self):
        """As an engine does, until `close`."""
        self.owner = StoreOwnership(self.root, self.catalog.catalog_id.hex(), CLOCK)
        self.owner.acquire(OWNER_LEASE_S)
        self._beating = threading.Thread(target=self._beat)
        self._beating.start()

    def _beat(self):
        while not self._stop.wait(0.2):
            with suppress(UnavailableError):  # a test has moved the store away
                self.owner.beat()

    def close(self):
        self._stop.set()
        if self._beating is not None:
            self._beating.join()
            self.owner.release()
        self.catalog.close()


def keys(name, count):
    return [hashlib.sha256(f"{name} {index}".encode()).digest() for index in range(count)]


class Shown:
    """A command that serves, as a test asks it."""

    def __init__(self, process, port, token):
        self.process, self.port, self.token = process, port, token

    def get(self, path, **headers):
        """Code, headers and body."""
        if self.token and "Authorization" not in headers:
            headers["Authorization"] = f"Bearer {self.token}"
        return ask(self.port, path, {k: v for k, v in headers.items() if v is not None})

    def value(self, name, **labels):
        """Of a metric; None: not shown."""
        inside = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
        line = re.escape(f"kvferry_exporter_{name}{f'{{{inside}}}' if inside else ''} ") + r"(\S+)"
        found = re.search(f"^{line}", self.get("/metrics")[2].decode(), re.MULTILINE)
        return found and float(found[1])

    def state(self):
        return json.loads(self.get("/state.json")[2])


def ask(port, path, headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request("GET", path, headers=headers)
        reply = connection.getresponse()
        return reply.status, dict(reply.getheaders()), reply.read()
    finally:
        connection.close()


def start(*arguments, **environment):
    program = [sys.executable, "-c", "from kvferry.cli.main import main; main()"]
    return subprocess.Popen(
        [*program, *map(str, arguments)],
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(**environment),
    )


@contextmanager
def showing(*arguments, token="", **environment):
    """The command, once it listens on a port of its own choice."""
    if token:
        environment["KVFERRY_VIEW_TOKEN"] = token
    process = start(*arguments, "--port", "0", **environment)
    said = []
    found = None
    while found is None:
        line = process.stderr.readline()
        assert line, said
        said.append(line)
        found = re.search(r"http://\S+:(\d+)/", line)
    drain = threading.Thread(target=lambda: said.extend(process.stderr), daemon=True)
    drain.start()
    shown = Shown(process, int(found[1]), token)
    shown.said = said
    try:
        yield shown
    finally:
        process.terminate()
        process.wait(30)
