"""`corral requests`: requests in flight, and those that have ended."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from supervisor.cli.options import Json, finish, offer

# As `proxy.requests.history.LIMIT_MAX`.
_LAST_MAX: Final = 10_000

commands = typer.Typer(help="Requests: in flight, and of the past.", invoke_without_command=True)

RequestId = Annotated[
    str,
    typer.Argument(metavar="ID", help="Of `corral requests`.", autocompletion=offer("request")),
]


@commands.callback()
def requests(  # noqa: PLR0913, PLR0917 (one for each option)
    context: typer.Context,
    last: Annotated[
        int | None,
        typer.Option("--last", "-n", min=1, max=_LAST_MAX, help="The latest N that have ended."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="Ended, of this model.", autocompletion=offer("model")),
    ] = None,
    client: Annotated[
        str | None, typer.Option("--client", help="Ended, of this API key or address.")
    ] = None,
    failed: Annotated[
        bool, typer.Option("--failed", help="Ended in an error, or cancelled.")
    ] = False,
    since: Annotated[
        str | None,
        typer.Option("--since", help="Ended since then: 90s, 15m, 1h, 2d, or a date."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the requests in flight; with any of these options, 20 that have ended."""
    if context.invoked_subcommand is not None:
        return
    from supervisor.commands.past_requests import Chosen, list_past
    from supervisor.commands.requests import list_requests

    chosen = Chosen(last, model, client, failed, since)
    call = (lambda: list_past(chosen)) if chosen.is_any else list_requests
    finish("requests", call, as_json=as_json)


@commands.command("show")
def requests_show(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="ID",
            help="Of `corral requests`, or of X-Request-Id.",
            autocompletion=offer("any request"),
        ),
    ],
    as_json: Json = False,
) -> None:
    """Show every figure of a request, and where its time went."""
    from supervisor.commands.past_requests import show as call

    finish("requests show", lambda: call(request_id), as_json=as_json)


@commands.command("forget")
def requests_forget(
    model: Annotated[
        str | None,
        typer.Option("--model", "-m", help="The model.", autocompletion=offer("model")),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Of all models.")] = False,
    as_json: Json = False,
) -> None:
    """Delete what is stored of requests that have ended; works without a daemon."""
    from supervisor.commands.past_requests import forget as call

    finish("requests forget", lambda: call(model, everything=everything), as_json=as_json)


@commands.command("cancel")
def requests_cancel(request_id: RequestId, as_json: Json = False) -> None:
    """End a request with an error, in whatever phase it is."""
    from supervisor.commands.requests import cancel as call

    finish("requests cancel", lambda: call(request_id), as_json=as_json)
