"""What stands between engines and their server elsewhere: a relay that may end TLS, and that may
lead to another server from one moment on, as the address of a set of replicas does."""

import contextlib
import socket
import ssl
import threading


class Relay:
    """Listens on `host` from `start` to `stop`. `target`: where connections lead that come from
    now on; those that are there are cut by `lead_to`."""

    def __init__(
        self,
        target: tuple[str, int],
        tls: ssl.SSLContext | None = None,
        host: str = "127.0.0.1",
    ):
        self._target = target
        self._tls = tls
        self._listener = socket.create_server((host, 0))
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()

    @property
    def port(self) -> int:
        return self._listener.getsockname()[1]

    def start(self) -> None:
        threading.Thread(target=self._accept, daemon=True).start()

    def stop(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._cut()

    def lead_to(self, target: tuple[str, int]) -> None:
        self._target = target
        self._cut()

    def _cut(self) -> None:
        with self._lock:
            for end in self._open:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        with contextlib.suppress(OSError):  # a client that speaks no TLS, a server that is gone
            if self._tls is not None:
                near = self._tls.wrap_socket(near, server_side=True)
            far = socket.create_connection(self._target)
            with self._lock:
                self._open |= {near, far}
            back = threading.Thread(target=self._pump, args=(far, near), daemon=True)
            back.start()
            self._pump(near, far)
            back.join()
            with self._lock:
                self._open -= {near, far}
            far.close()
        near.close()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
