"""What a server says that is none of our answers must cost hits, and never an engine."""

import socket
import threading

import pytest

pytest.importorskip("valkey", reason="needs the client of the catalog on Valkey")
from kvferry.catalog.base import Commit, Slot
from kvferry.catalog.open import open_url
from kvferry.clock import SystemClock
from kvferry.errors import UnavailableError
from kvferry.layout import Address

NAMESPACE, KEY = b"n" * 32, b"k" * 32
INFO = b"run_id:abc\r\nmaxmemory_policy:noeviction\r\n"
OPENED = b"K" + b"c" * 16
ANSWERS = {
    "word": b"+OK\r\n",
    "number": b":1\r\n",
    "nothing": b"$-1\r\n",
    "empty": b"$0\r\n\r\n",
    "empty list": b"*0\r\n",
    "list of nothing": b"*1\r\n$-1\r\n",
    "status alone": b"$1\r\nK\r\n",
    "too short": b"$4\r\nKxyz\r\n",
    "another protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n",
}
SLOT = Slot(Address(0, 0), bytes(16))
VERBS = {
    "lookup": (NAMESPACE, [KEY]),
    "lookup_packed": (NAMESPACE, [KEY]),
    "present": (NAMESPACE, [KEY]),
    "commit": (NAMESPACE, [Commit(KEY, bytes(32), 0, SLOT, 0, 1)]),
    "evict": (NAMESPACE, [(KEY, bytes(16))]),
    "sweep": (),
    "adopt": (0, NAMESPACE, []),
    "stats": (),
    "segments": (),
}


class Babbler:
    """A server that greets and opens as it should, and then gives one answer to everything."""

    def __init__(self):
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.answer = b""
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self):
        try:
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=[connection], daemon=True).start()
        except OSError:
            return

    def _serve(self, connection):
        with connection:
            while said := connection.recv(1 << 16):
                known = INFO if b"INFO" in said else OPENED if b"_open" in said else None
                ours = known and b"$%d\r\n%s\r\n" % (len(known), known)
                connection.sendall(ours or self.answer)

    def close(self):
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        self._thread.join()


@pytest.fixture
def babbler():
    babbler = Babbler()
    yield babbler
    babbler.close()


@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)
def test_an_answer_that_makes_no_sense_is_none(babbler, answer):
    babbler.answer = answer
    catalog = open_url(f"valkey://127.0.0.1:{babbler.port}", SystemClock())
    catalog.open(b"s" * 16, 1 << 26, 1 << 20)
    for verb, arguments in VERBS.items():
        with pytest.raises(UnavailableError):
            getattr(catalog, verb)(*arguments)
    catalog.close()
