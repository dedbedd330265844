"""An HTTP server that answers completions as vLLM does, or fails as it does when it is told to."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from kvferry.transfer import params

SECRET = b"a secret of the tests"
OFFER = params.Offer(bytes(16), bytes(range(16)), "127.0.0.1", 5700, bytes(32), bytes(32), 300)
WORDS = ["four", " hundred"]
ABORTED = {"text": "fo", "finish_reason": "abort"}


class Engine(ThreadingHTTPServer):
    """`requests`: what it was asked, in order, with path and headers. `fault`: a function of the
    handler and the request that answers instead; returns whether it did. `is_healthy`: what it
    says of itself; None: nothing at all."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, port=0):
        super().__init__(("127.0.0.1", port), Answers)
        self.requests, self.headers = [], []
        self.fault = None
        self.is_healthy = True
        self.silence = threading.Event()
        self.hung_up = threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"

    def close(self):
        """No connection is accepted any more."""
        self.silence.set()
        self.shutdown()
        self.server_close()

    def handle_error(self, *_):
        """Clients hang up in these tests."""


class Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.server.is_healthy is None:
            self.server.silence.wait()
        code = 200 if self.server.is_healthy else 503
        self.reply(b'{"data": [{"id": "m"}]}', code=code)

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, request))
        self.server.headers.append(self.headers)
        if self.server.fault and self.server.fault(self, request):
            return
        if request.get("stream"):
            self.stream(*WORDS)
            return
        answer = {"choices": [{"text": "".join(WORDS)}], "kv_transfer_params": None}
        if params.wants_remote_decode(request.get("kv_transfer_params")):
            answer["kv_transfer_params"] = params.mint(SECRET, OFFER)
        self.reply(json.dumps(answer).encode())

    def stream(self, *words, ends=True):
        events = [f"data: {word if word[0] == '{' else json.dumps(word)}\n\n" for word in words]
        body = "".join(events + ["data: [DONE]\n\n"] * ends).encode()
        self.reply(body, "text/event-stream", missing_bytes=0 if ends else 7)

    def reply(self, body, kind="application/json", code=200, missing_bytes=0):
        """`missing_bytes`: announced, and never sent."""
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body) + missing_bytes))
        self.end_headers()
        self.wfile.write(body)

    def wait_until_hung_up(self):
        """The client gives up; nothing is answered."""
        if not self.connection.recv(1):
            self.server.hung_up.set()

    def log_message(self, *_):
        pass


# Faults: see `Engine.fault`.


def dies(handler, _):
    handler.close_connection = True
    return True


def dies_in_the_answer(handler, _):
    handler.reply(b'{"choices"', missing_bytes=100)
    return True


def fails(handler, _):
    handler.reply(b'{"error": {"message": "EngineDeadError", "code": 500}}', code=500)
    return True


def aborts(handler, request):
    """As vLLM 0.32 after SIGTERM."""
    choice = json.dumps({"choices": [ABORTED]}, separators=(",", ":"))
    if request.get("stream"):
        handler.stream(choice)
    else:
        handler.reply(choice.encode())
    return True


def fails_in_its_stream(handler, request):
    if request.get("stream"):
        handler.stream('{"error": {"message": "EngineDeadError", "code": 500}}')
    return bool(request.get("stream"))


def hangs(handler, _):
    handler.wait_until_hung_up()
    return True


def stops_in_its_stream(handler, _):
    handler.stream(WORDS[0], ends=False)
    return True


def ends_its_stream_early(handler, _):
    handler.reply(f'data: "{WORDS[0]}"\n\n'.encode(), "text/event-stream")
    return True


def aborts_in_its_stream(handler, _):
    aborted = json.dumps({"choices": [ABORTED]}, separators=(",", ":"))
    handler.reply(f'data: "{WORDS[0]}"\n\n'.encode(), "text/event-stream", missing_bytes=500)
    handler.server.silence.wait(0.2)
    handler.wfile.write(f"data: {aborted}\n\ndata: [DONE]\n\n".encode())
    return True
