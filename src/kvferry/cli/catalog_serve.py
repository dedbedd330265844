"""`kvferry catalog serve`: a Valkey server for those who have none.

It listens on loopback, asks for a password that it makes itself, and keeps its records in a folder.
Valkey does the serving; this starts it, gives it the functions, and stops it in order.
"""

import os
import signal
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvferry.cli import options, output
from kvferry.clock import Clock, SystemClock
from kvferry.config import CATALOG_PASSWORD_VARIABLE, catalog_password, state_folder
from kvferry.errors import ConfigError
from kvferry.server_url import DEFAULT_PORT, ServerUrl, is_loopback
from kvferry.setting_values import parse_size

PASSWORD_BYTES = 24


class ServeReport(msgspec.Struct, frozen=True):
    """`password_file` None: the password is the environment's, or there is none."""

    url: str
    folder: str
    password_file: str | None
    process_id: int


class _Stopped(BaseException):
    """A signal asked for the end."""


def serve(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="Where the records are kept. Default: catalog-server in the state folder."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = DEFAULT_PORT,
    memory: Annotated[
        str | None, typer.Option(help='Most memory that the records may take, such as "4GiB".')
    ] = None,
    no_password: Annotated[
        bool, typer.Option("--no-password", help="Ask for none. Only on loopback.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Run a Valkey server for the catalog, until Ctrl-C. The password is that of
    KVFERRY_CATALOG_PASSWORD, or of the file `password` in the folder, made at the first start."""
    try:
        from kvferry.catalog.valkey_server import OwnServer  # noqa: PLC0415 - needs an extra
    except ImportError as error:
        raise ConfigError(
            "catalog.client", "pip install kvferry[serve]", reason=str(error)
        ) from error
    folder = (folder or state_folder() / "catalog-server").absolute()
    if no_password and not is_loopback(host):
        raise ConfigError(
            "catalog.serve", f"{host} can be reached from other hosts: it needs a password"
        )
    file = None if no_password or catalog_password() else folder / "password"
    password = None if no_password else catalog_password() or _own_password(file, SystemClock())
    url = ServerUrl(host, port, 0, False, None, password, None)
    lines = [f"maxmemory {parse_size('--memory', memory)}"] if memory else []
    server = OwnServer(folder, url, SystemClock(), lines)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    try:
        server.start()
        _announce(
            ServeReport(url.name, str(folder), file and str(file), server.process_id),
            as_json=as_json,
        )
        status = server.wait()
    except _Stopped:
        return
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        server.stop()
    raise ConfigError("catalog.serve", f"the server ended by itself ({status}): see {server.log}")


def _stop(number: int, frame: object) -> None:
    raise _Stopped


def _own_password(file: Path, clock: Clock) -> str:
    """Of the file, for its owner's eyes only; made if it is not there. Raises ConfigError."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if file.stat().st_mode & 0o077:
            raise ConfigError(
                "catalog.serve", f"{file} can be read by others: chmod 600 it"
            ) from None
        password = file.read_text().strip()
        if not password:
            raise ConfigError("catalog.serve", f"{file} is empty: delete it") from None
        return password
    with os.fdopen(descriptor, "w") as opened:
        password = clock.random_bytes(PASSWORD_BYTES).hex()
        opened.write(password + "\n")
    return password


def _announce(report: ServeReport, *, as_json: bool) -> None:
    if as_json:
        output.print_json(report)
        return
    print(f"catalog: {report.url}", flush=True)
    print(f"records: {report.folder}, flushed once a second")
    if report.password_file:
        print(f"password: export {CATALOG_PASSWORD_VARIABLE}=$(cat {report.password_file})")
    print(f'engines: "catalog": "{report.url}" in kv_connector_extra_config', flush=True)
