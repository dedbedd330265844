"""The command `kvferry`: wires the commands and turns errors into exit codes."""

import sys
from typing import Annotated

import typer

import kvferry
from kvferry.cli import bench, catalog_commands, config_from, output, pd_demo
from kvferry.cli.check import check
from kvferry.cli.clear import clear
from kvferry.cli.dashboard import dashboard
from kvferry.cli.demo import demo
from kvferry.cli.doctor import doctor
from kvferry.cli.exporter import exporter
from kvferry.cli.limit import limit
from kvferry.cli.resize import resize
from kvferry.cli.route import route
from kvferry.cli.status import status
from kvferry.errors import Error

app = typer.Typer(
    help="KV cache for vLLM that moves.", no_args_is_help=True, pretty_exceptions_enable=False
)
for _command in (demo, doctor, status, check, clear, resize, limit, route, exporter, dashboard):
    app.command()(_command)
app.add_typer(bench.app, name="bench")
app.add_typer(pd_demo.app, name="pd")
app.add_typer(catalog_commands.app, name="catalog")
app.add_typer(config_from.app, name="config")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(kvferry.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point. Exit codes: docs/operations.md."""
    try:
        app()
    except Error as error:
        output.complain(f"kvferry: {error}")
        sys.exit(output.exit_code(error))
