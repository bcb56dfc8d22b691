"""`corral requests`: requests in flight."""

from __future__ import annotations

from typing import Annotated

import typer

from supervisor.cli.options import Json, finish, offer

commands = typer.Typer(help="Requests in flight.", invoke_without_command=True)


@commands.callback()
def requests(context: typer.Context, as_json: Json = False) -> None:
    """List the requests in flight: who waits, for what, and how far each is."""
    if context.invoked_subcommand is None:
        from supervisor.commands.requests import list_requests as call

        finish("requests", call, as_json=as_json)


@commands.command("cancel")
def requests_cancel(
    request_id: Annotated[
        str,
        typer.Argument(metavar="ID", help="Of `corral requests`.", autocompletion=offer("request")),
    ],
    as_json: Json = False,
) -> None:
    """End a request with an error, in whatever phase it is."""
    from supervisor.commands.requests import cancel as call

    finish("requests cancel", lambda: call(request_id), as_json=as_json)
