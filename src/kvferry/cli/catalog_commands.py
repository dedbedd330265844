"""`kvferry catalog`: commands about catalogs."""

import typer

from kvferry.cli.catalog_rebuild import rebuild
from kvferry.cli.catalog_serve import serve

app = typer.Typer(help="Serve a catalog, or make it again from the pages.", no_args_is_help=True)
app.command()(serve)
app.command()(rebuild)
