"""Arguments that several commands have, and how they name a store."""

from typing import Annotated

import typer

from kvferry import config
from kvferry.config import Config

_PAGES_HELP = "The store: posix:///path, or just the path."

Pages = Annotated[str, typer.Argument(metavar="PAGES", help=_PAGES_HELP)]
OptionalPages = Annotated[str | None, typer.Argument(metavar="[PAGES]", help=_PAGES_HELP)]
CatalogUrl = Annotated[
    str | None, typer.Option("--catalog", help="Its catalog, if not the default one.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON on standard output, for scripts.")]


def store_config(pages: str, catalog: str | None = None) -> Config:
    """A configuration that names an existing store. Raises ConfigError."""
    named = {"catalog": catalog} if catalog else {}
    return config.decode({"pages": f"posix://{pages}" if pages.startswith("/") else pages, **named})
