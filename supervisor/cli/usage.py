"""`corral usage`: who used how much."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from supervisor.cli.options import Json, finish, offer

commands = typer.Typer()


@commands.command()
def usage(
    by: Annotated[
        Literal["key", "model", "day", "month"] | None,
        typer.Option(help="What each line sums up. Unset: a key and a model."),
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="DAY", help="2026-11-22, 2026-11, or 7d. Unset: all.")
    ] = None,
    key: Annotated[
        str | None, typer.Option(help="Only of this API key.", autocompletion=offer("key"))
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Only of this model.", autocompletion=offer("model"))
    ] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    as_json: Json = False,
) -> None:
    """Show how many tokens, and how much time of slots and processors, each API key used.

    Works without a daemon. CACHED tokens were taken from a cache instead of being computed.
    """
    if as_csv and as_json:
        raise typer.BadParameter("--csv and --json exclude each other")
    from supervisor.commands.usage import usage as call
    from supervisor.usage.query import Query

    finish("usage", lambda: call(Query(by, since, key, model), as_csv=as_csv), as_json=as_json)
