"""`corral key`: API keys of clients."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from supervisor.cli.options import Config, Json, finish, offer

commands = typer.Typer(help="API keys of clients.", no_args_is_help=True)


@commands.command("add")
def key_add(  # noqa: PLR0913, PLR0917 (a command has its options)
    name: Annotated[str, typer.Argument(help="Its name in logs and limits.")],
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="A model it may use; repeat for more. Unset: all.",
            autocompletion=offer("model"),
        ),
    ] = None,
    in_flight: Annotated[
        int | None, typer.Option(min=1, max=100_000, help="Requests at once.")
    ] = None,
    rpm: Annotated[
        int | None, typer.Option(min=1, max=1_000_000, help="Requests a minute.")
    ] = None,
    priority: Annotated[
        Literal["interactive", "batch"],
        typer.Option(help="batch: all other requests go first."),
    ] = "interactive",
    admin: Annotated[
        bool, typer.Option("--admin", help="It may use the dashboard, and sees all requests.")
    ] = False,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompts and answers a minute.")
    ] = None,
    tokens_per_day: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompts and answers a day.")
    ] = None,
    max_context: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a prompt and the answer it asks for.")
    ] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Create a random API key, print it once, and store only its SHA-256.

    A running daemon accepts it within a second.
    """
    from proxy.auth.keys_file import Key
    from supervisor.commands.key import add as call

    key = Key(
        name,
        b"",
        in_flight,
        rpm,
        frozenset(models) if models else None,
        priority,
        admin=admin,
        tokens_per_minute=tokens_per_minute,
        tokens_per_day=tokens_per_day,
        max_context=max_context,
    )
    finish("key add", lambda: call(key, config), as_json=as_json)


@commands.command("list")
def key_list(config: Config = None, as_json: Json = False) -> None:
    """List the API keys with their limits."""
    from supervisor.commands.key import list_keys as call

    finish("key list", lambda: call(config), as_json=as_json)


@commands.command("remove")
def key_remove(
    name: Annotated[str, typer.Argument(autocompletion=offer("key"))],
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Remove an API key; a running daemon rejects it within a second."""
    from supervisor.commands.key import remove as call

    finish("key remove", lambda: call(name, config), as_json=as_json)
