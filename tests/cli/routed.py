"""`kvferry route` in a process of its own, as a test drives it."""

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

PATIENCE_S = 60.0
BODY_BYTES_MAX = 100_000


class Routed:
    """A router with its engines, as a test drives them."""

    def __init__(self, url, process, producers, consumers):
        self.url, self.process = url, process
        self.producers, self.consumers = producers, consumers

    def post(self, path="/v1/completions", **body):
        """Code and text of the answer."""
        return self.send(path, json.dumps({"model": "m", **body}).encode())

    def send(self, path, body):
        request = urllib.request.Request(self.url + path, body)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def get(self, path):
        try:
            with urllib.request.urlopen(self.url + path, timeout=PATIENCE_S) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, ""

    def metric(self, name, **labels):
        inside = ",".join(f'{label}="{value}"' for label, value in sorted(labels.items()))
        line = re.escape(f"kvferry_router_{name}{{{inside}}} ") + r"(\S+)"
        found = re.search(line, self.get("/metrics")[1])
        return float(found[1]) if found else 0.0

    def wait_until_healthy(self, producers, consumers):
        wait_until(
            lambda: (
                self.metric("healthy_engines", role="producer") == producers
                and self.metric("healthy_engines", role="consumer") == consumers
            )
        )


def wait_until(holds):
    give_up_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up_s
        time.sleep(0.02)


def command(*arguments):
    return [sys.executable, "-c", "from kvferry.cli.main import main; main()", "route", *arguments]


@contextmanager
def running(producers, consumers, *options):
    """The command, once all engines that live are known to."""
    port = free_port()
    arguments = ["--port", str(port), "--body", str(BODY_BYTES_MAX), *options]
    for role, engines in (("--producer", producers), ("--consumer", consumers)):
        for engine in engines:
            arguments += [role, engine.url]
    process = subprocess.Popen(command(*arguments))
    routed = Routed(f"http://127.0.0.1:{port}", process, producers, consumers)
    try:
        wait_until(lambda: is_listening(port))
        routed.wait_until_healthy(len(producers), len(consumers))
        yield routed
    finally:
        process.kill()
        process.wait()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_listening(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
