"""`kvferry doctor`: what would keep an engine from using kvferry here, and what to do about it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from kvferry.cli import (
    engine_checks,
    machine_checks,
    options,
    output,
    store_checks,
    transfer_checks,
)
from kvferry.cli.finding import Finding, State, warning
from kvferry.config import Config, split_url
from kvferry.errors import ConfigError
from kvferry.vllm_plugin import TRANSFER_CONNECTOR

_MARKS = {
    State.PASSED: "[green]passed [/green]",
    State.WARNING: "[yellow]warning[/yellow]",
    State.FAILED: "[red]failed [/red]",
}


def doctor(
    pages: options.OptionalPages = None,
    transfer_config: Annotated[
        str | None,
        typer.Option("--kv-transfer-config", help="The JSON that you give to vLLM."),
    ] = None,
    is_transfer: Annotated[
        bool,
        typer.Option("--transfer", help="Whether NIXL moves bytes here, and how fast."),
    ] = False,
    usrbio_library: options.UsrbioLibrary = None,
    named_pages: Annotated[
        str | None, typer.Option("--pages", help="As PAGES, for those who look for an option.")
    ] = None,
    as_json: options.AsJson = False,
) -> None:
    """Check this machine, a store's folder and the JSON given to vLLM; say what to do."""
    findings = list(examine(named_pages or pages, transfer_config, is_transfer, usrbio_library))
    if as_json:
        output.print_json(findings)
    else:
        _print(findings)
    if any(finding.state is State.FAILED for finding in findings):
        raise typer.Exit(output.WRONG)


def examine(
    pages: str | None,
    transfer_config: str | None,
    is_transfer: bool = False,
    usrbio_library: str | None = None,
) -> Iterator[Finding]:
    """All findings, in the order in which one would mend them."""
    yield machine_checks.check_python()
    yield machine_checks.check_native()
    yield machine_checks.check_vllm(machine_checks.installed_vllm())
    yield machine_checks.check_plugin()
    yield machine_checks.check_shared_memory()
    transfer = engine_checks.decode_transfer_config(transfer_config) if transfer_config else None
    if transfer is not None:
        yield from engine_checks.check_transfer_config(transfer)
    if is_transfer:
        yield from _check_transfer(transfer)
    named = _named_config(transfer)
    config = options.store_config(pages) if pages else named
    if pages and named is not None and config is not None:
        if _place(named) != _place(config):
            yield warning(
                "pages",
                f"PAGES is {config.home}, the JSON names {named.home}",
                "engines use the JSON's, so that one is looked at: name the same",
            )
        config = named
    if config is not None and usrbio_library is not None:
        config = msgspec.structs.replace(config, usrbio_library=usrbio_library)
    if config is not None:
        yield from store_checks.check_store(config)


def _check_transfer(transfer: dict[str, Any] | None) -> Iterator[Finding]:
    """Settings are checked already where the JSON names the connector."""
    if engine_checks.own_config(transfer or {}, TRANSFER_CONNECTOR) is None:
        yield from transfer_checks.check_settings({}, None)
    yield from transfer_checks.check_nixl(transfer_checks.installed_nixl())


def _place(config: Config) -> tuple[str, Path]:
    """Where pages lie, the same however it is written."""
    scheme, path = split_url(config.home)
    return scheme, Path(path).resolve()


def _named_config(transfer: dict[str, Any] | None) -> Config | None:
    own = engine_checks.own_config(transfer) if transfer else None
    try:
        return engine_checks.settings(own) if own else None
    except ConfigError:
        return None  # reported by check_transfer_config


def _print(findings: list[Finding]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    width = max(len(finding.check) for finding in findings)
    for finding in findings:
        console.print(f"{_MARKS[finding.state]} {finding.check:{width}}  {escape(finding.detail)}")
        if finding.cure:
            console.print(f"{'':7} {'':{width}}  -> {escape(finding.cure)}")
