"""Arguments that several commands have, and how they name a store."""

from pathlib import Path
from typing import Annotated

import typer

from kvferry import config
from kvferry.config import Config

_PAGES_HELP = (
    "The store: posix:///path, or just the path; usrbio:///path. Several roots: commas between."
)

Pages = Annotated[str, typer.Argument(metavar="PAGES", help=_PAGES_HELP)]
OptionalPages = Annotated[str | None, typer.Argument(metavar="[PAGES]", help=_PAGES_HELP)]
CatalogUrl = Annotated[
    str | None, typer.Option("--catalog", help="Its catalog, if not the default one.")
]
UsrbioLibrary = Annotated[
    str | None,
    typer.Option("--usrbio-library", help="Path of libhf3fs_api_shared.so, for usrbio://."),
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output, for scripts.")]

Host = Annotated[str, typer.Option(help="Where to listen.")]
TokenFile = Annotated[
    str | None,
    typer.Option(help="File with the token to ask for. Default: of KVFERRY_VIEW_TOKEN."),
]

Scratch = Annotated[
    Path | None,
    typer.Argument(help="Where to write; on the disk to be measured. Default: a temporary folder."),
]
Shape = Annotated[str, typer.Option(help="Of the model: tiny, 0.6b or 8b.")]
Lengths = Annotated[str, typer.Option(help="Tokens of prompts.")]
Prompts = Annotated[int, typer.Option(min=1, help="Prompts of each length.")]
Mode = Annotated[str, typer.Option(help="eager, graphs (of decode steps) or compiled.")]
Settings = Annotated[str, typer.Option(help="More arguments of vLLM's LLM, as JSON.")]
Ferry = Annotated[str, typer.Option(help="More settings of kvferry, as JSON.")]


def store_config(
    pages: str, catalog: str | None = None, usrbio_library: str | None = None
) -> Config:
    """A configuration that names an existing store. Raises ConfigError."""
    options = {"catalog": catalog, "usrbio_library": usrbio_library}
    named = {name: value for name, value in options.items() if value}
    urls = [f"posix://{url}" if url.startswith("/") else url for url in _roots(pages)]
    return config.decode({"pages": urls[0] if len(urls) == 1 else urls, **named})


def _roots(pages: str) -> list[str]:
    """A comma may also be part of a path."""
    pieces = pages.split(",")
    are_roots = all(piece.startswith(("/", "posix://")) for piece in pieces)
    return pieces if are_roots else [pages]
