"""Checks of what the transfer connector needs: its settings here, NIXL in a process of its own.

NIXL loads drivers that may print, crash or hang; what `nixl_probe` finds is one line of JSON, and
UCX says on standard error which transports it took.
"""

import importlib.metadata
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvferry import config
from kvferry._nixl import PACKAGES
from kvferry.cli.finding import Finding, failed, passed, warning
from kvferry.cli.nixl_probe import BACKEND, MEMORY, Probed
from kvferry.cli.output import size_text
from kvferry.clock import Clock, SystemClock
from kvferry.errors import ConfigError
from kvferry.metrics import Metrics
from kvferry.transfer.compatibility import Compatibility
from kvferry.transfer.handshake import Listener
from kvferry.transfer.settings import SECRET_BYTES_MIN, Settings
from kvferry.transfer.settings import check_settings as check_together

NIXL_MIN = (1, 4)
PROBE_S = 60.0
INSTALL = (
    "pip install kvferry[transfer], which brings nixl-cu12; nixl-cu13 where vLLM was built for that"
)
NEW_SECRET = f"make one (openssl rand -hex 32); all engines get it in {config.SECRET_VARIABLE}"
MANUAL = "see docs/operations.md, Prefill here, decode there"
ERROR_CHARACTERS = 400


def check_settings(options: Mapping[str, Any], role: str | None) -> Iterator[Finding]:
    """`options`: kv_connector_extra_config; `role`: kv_role, None if nobody said. Nothing that is
    found has the secret in it."""
    try:
        values = config.decode_fields(options, Settings)
    except ConfigError as error:
        yield failed("settings", str(error), "see docs/configuration.md")
        return
    secret = yield from _check_secret(values.get("secret_file"))
    settings = Settings(secret=secret, **values)
    try:
        check_together(settings)
    except ConfigError as error:
        if error.kind != "transfer.secret":
            yield failed("settings", error.message, "see docs/configuration.md")
    else:
        yield passed("settings", "valid")
    if role != "kv_consumer":
        yield check_listening(settings, SystemClock())


def _check_secret(file: str | None) -> Any:
    """Yields what it finds, returns the secret."""
    try:
        secret = config.transfer_secret(file)
    except ConfigError as error:
        yield failed("secret", error.message, "give the engine's user the file")
        return b""
    source = file or config.SECRET_VARIABLE
    if not secret:
        yield failed("secret", f"none in {source}", NEW_SECRET)
    elif len(secret) < SECRET_BYTES_MIN:
        detail = f"{source} has fewer than {SECRET_BYTES_MIN} bytes"
        yield failed("secret", detail, NEW_SECRET)
    else:
        yield passed("secret", f"in {source}")
    return secret


def check_listening(settings: Settings, clock: Clock) -> Finding:
    """As a producer does at start, and whether its own name for itself is one."""
    check = "listen address"
    listener = Listener(settings, b"", Compatibility({}), clock, Metrics())
    try:
        listener.open()
        listener.close()
        socket.getaddrinfo(settings.advertise_host, None)
    except ConfigError as error:
        taken = "another bind_host or bind_port; a producer that runs already holds its port"
        return failed(check, error.message, taken if error.kind == "transfer.bind" else MANUAL)
    except OSError as error:
        detail = f"advertise_host={settings.advertise_host!r} has no address: {error.strerror}"
        return failed(check, detail, "name this machine as consumers know it")
    port = f"port {settings.bind_port}" if settings.bind_port else "a free port"
    return passed(check, f"{settings.bind_host}, {port}; consumers dial {settings.advertise_host}")


def check_nixl(versions: Mapping[str, str]) -> Iterator[Finding]:
    """`versions`: of installed distributions that bring NIXL. Moves data between two agents."""
    if not versions:
        yield failed("NIXL", "not installed", INSTALL)
        return
    name, text = next(iter(versions.items()))
    if tuple(map(int, re.findall(r"\d+", text)[:2])) < NIXL_MIN:
        yield failed("NIXL", f"{name} {text}", f"install {'.'.join(map(str, NIXL_MIN))} or newer")
        return
    yield passed("NIXL", f"{name} {text}")
    yield from judge(*probe())


def installed_nixl() -> dict[str, str]:
    found = importlib.metadata.packages_distributions()
    names = [name for package in PACKAGES for name in found.get(package, [])]
    return {name: importlib.metadata.version(name) for name in names}


def probe() -> tuple[int, str, str]:
    """Exit code, standard output and error of `nixl_probe`; it has a minute."""
    command = [sys.executable, "-m", "kvferry.cli.nixl_probe"]
    environment = config.child_environment(UCX_LOG_LEVEL="info")
    try:
        done = subprocess.run(
            command, capture_output=True, timeout=PROBE_S, check=False, env=environment
        )
    except subprocess.TimeoutExpired as error:
        hung = f"no answer within {PROBE_S:.0f} s"
        return -1, _text(error.stdout), f"{_text(error.stderr)}\n{hung}"
    return done.returncode, _text(done.stdout), _text(done.stderr)


def judge(exit_code: int, told: str, log: str) -> Iterator[Finding]:
    """What a probe's end says."""
    try:
        probed = msgspec.json.decode(told, type=Probed)
    except msgspec.MsgspecError:
        cure = "UCX_TLS=tcp,sm and UCX_MODULES=^ib show whether a driver is at fault"
        yield failed("self-test", _last_line(log) or f"exit code {exit_code}", cure)
        return
    yield _check_plugins(probed)
    yield _check_transports(log)
    if probed.problem:
        yield failed("self-test", probed.problem, "UCX_TLS names transports, such as tcp,sm")
    else:
        rate = f"{size_text(int(probed.bytes_per_s))}/s"
        moved = f"{size_text(probed.moved_bytes)} verified"
        yield passed("self-test", f"{moved}, {rate} between two agents of this machine")
    if exit_code:
        detail = "NIXL's process crashed when it ended, after its work"
        cure = "UCX_MODULES=^ib avoids it on machines without InfiniBand"
        yield warning("NIXL's end", detail, cure)


def _check_plugins(probed: Probed) -> Finding:
    usable = {name: kinds for name, kinds in probed.plugins.items() if kinds}
    detail = "; ".join(f"{name} for {', '.join(kinds)}" for name, kinds in sorted(usable.items()))
    if absent := sorted(probed.plugins.keys() - usable.keys()):
        detail += f"; without their libraries: {', '.join(absent)}"
    if MEMORY not in usable.get(BACKEND, ()):
        return failed("NIXL plugins", detail, f"{BACKEND} is not usable: install NIXL again")
    return passed("NIXL plugins", detail)


def _check_transports(log: str) -> Finding:
    """From UCX's own words: "... intra-node cfg#1 rma_am(tcp/lo) am(tcp/lo cma/memory)"."""
    version = next(iter(re.findall(r"UCX +INFO +Version (\S+)", log)), "of unknown version")
    routes = re.findall(r"(?:intra|inter)-node cfg#\d+ (.+)", log)
    lanes = [lane for route in routes for lane in re.findall(r"[\w.]+/[\w.:]+", route)]
    if not lanes:
        cure = "unset UCX_LOG_LEVEL and UCX_LOG_FILE"
        return warning("transports", f"UCX {version} does not say what it uses", cure)
    return passed("transports", f"UCX {version}: {', '.join(dict.fromkeys(lanes))}")


def _last_line(log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip()]
    return lines[-1][-ERROR_CHARACTERS:] if lines else ""


def _text(output: bytes | None) -> str:
    return (output or b"").decode(errors="replace")
