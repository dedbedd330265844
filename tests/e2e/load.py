"""Clients that ask a router all the time, and check every answer."""

import json
import random
import threading
import time
import urllib.error
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tests.e2e import servers

ANSWER_TOKENS = 24


def body(model: str, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
    """A greedy request whose answer is tokens."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **more,
    }


def tokens_of(answer: bytes, is_stream: bool) -> list[int] | None:
    """None: the stream ended with an error."""
    if not is_stream:
        return json.loads(answer)["choices"][0]["token_ids"]
    found: list[int] = []
    for event in servers.events(answer):
        if "error" in event:
            return None
        for choice in event["choices"]:
            found += choice["token_ids"] or ()
    return found


@dataclass
class Seen:
    """By all clients. `cut_s`: when streams ended with an error; `wrong`: what should not be;
    `longest_s`: of an answer."""

    answered: int = 0
    streamed: int = 0
    cut_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    longest_s: float = 0.0


class Load:
    """Runs inside `with`; each client has one request under way."""

    def __init__(
        self,
        url: str,
        model: str,
        answers: Mapping[tuple[int, ...], list[int]],
        client_count: int,
    ):
        self._url, self._model, self._answers = url, model, answers
        self._client_count = client_count
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._clients: list[Any] = []
        self.seen = Seen()

    def __enter__(self) -> "Load":
        self._pool = ThreadPoolExecutor(self._client_count)
        self._clients = [self._pool.submit(self._run, i) for i in range(self._client_count)]
        return self

    def __exit__(self, *_: object) -> None:
        """Waits for what is under way; raises what a client raised."""
        self._is_over.set()
        self._pool.shutdown()
        for client in self._clients:
            client.result()

    def _run(self, number: int) -> None:
        generator = random.Random(number)
        while not self._is_over.is_set():
            prompt = generator.choice(list(self._answers))
            is_stream = generator.random() < 0.3
            salt = {} if generator.random() < 0.2 else {"cache_salt": f"{generator.random()}"}
            started_s = time.monotonic()
            try:
                request = body(self._model, prompt, stream=is_stream, **salt)
                tokens = tokens_of(servers.post(self._url, request), is_stream)
            except urllib.error.HTTPError as error:
                self._note(f"code {error.code}: {error.read()[:200]!r}", started_s, is_stream)
            except OSError as error:
                self._note(repr(error), started_s, is_stream)
            else:
                right = self._answers[prompt]
                wrong = tokens is not None and tokens != right
                text = f"{tokens} and not {right}, prompt of {len(prompt)}" if wrong else ""
                self._note(text, started_s, is_stream, is_cut=tokens is None)

    def _note(self, wrong: str, started_s: float, is_stream: bool, is_cut: bool = False) -> None:
        now_s = time.monotonic()
        with self._lock:
            seen = self.seen
            seen.longest_s = max(seen.longest_s, now_s - started_s)
            if wrong:
                seen.wrong.append(wrong)
            elif is_cut:
                seen.cut_s.append(now_s)
            else:
                seen.answered += 1
                seen.streamed += is_stream
