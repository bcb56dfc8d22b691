"""Declares the commands of settings, keys, hooks, engines, models and profiles."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import typer

from supervisor.cli.options import Config, Json, Models, Yes, ask, finish, offer, read_seconds
from supervisor.output import CommandResult

setup_commands = typer.Typer()


@setup_commands.command()
def init(
    models: Models = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a settings file; a backup is kept.")
    ] = False,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Write a commented corral.toml for this machine and the models that are stored here."""
    from supervisor.cli.init import init as call

    finish("init", lambda: call(models or [], config, is_forced=force), as_json=as_json)


@setup_commands.command("import")
def import_settings(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE | -- COMMAND...",
            help="A llama-swap YAML, a router preset (.ini), a Modelfile, a file with a command; "
            "- reads standard input. After two dashes: the words of a llama-server command.",
        ),
    ],
    kind: Annotated[
        Literal["command", "llama-swap", "router", "modelfile"] | None,
        typer.Option("--from", help="Its format. Unset: detected from the content."),
    ] = None,
    write: Annotated[
        bool, typer.Option("--write", help="Write it into corral.toml, with a backup beside it.")
    ] = False,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Turn settings of other programs into corral.toml, and list what has no equivalent."""
    from supervisor.cli.init import import_settings as call

    finish("import", lambda: call(source, kind, config, is_written=write), as_json=as_json)


@setup_commands.command()
def connect(  # noqa: PLR0913, PLR0917 (a command has its options)
    client: Annotated[
        str | None,
        typer.Argument(
            metavar="[CLIENT]",
            help="A client program; none lists them.",
            autocompletion=offer("client"),
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="For most requests. Unset: the default model, or a loaded model.",
            autocompletion=offer("model"),
        ),
    ] = None,
    small: Annotated[
        str | None,
        typer.Option(
            help="For short requests, such as titles. Unset: the same model.",
            autocompletion=offer("model"),
        ),
    ] = None,
    write: Annotated[
        bool,
        typer.Option("--write", help="Check with one request, then write; each file has a backup."),
    ] = False,
    undo: Annotated[
        bool, typer.Option("--undo", help="Remove the settings of --write; the rest stays.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="With --write: send a request first.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Show a client's settings for the running daemon, write them, or remove them again."""
    from supervisor.cli import connect as calls

    if client is None:
        if write or undo:
            raise typer.BadParameter("--write and --undo need a CLIENT")
        finish("connect", calls.list_clients, as_json=as_json)
        return
    if write and undo:
        raise typer.BadParameter("choose one of --write and --undo")
    if undo:
        finish("connect", lambda: calls.undo(client), as_json=as_json)
    if write:
        finish("connect", lambda: calls.write(client, model, small, checks=check), as_json=as_json)
    finish("connect", lambda: calls.show(client, model, small), as_json=as_json)


config_commands = typer.Typer(help="The settings file, corral.toml.", no_args_is_help=True)

SettingKey = Annotated[
    str,
    typer.Argument(
        metavar="KEY", help="A dotted key, as proxy.listen.", autocompletion=offer("setting")
    ),
]


@config_commands.command("check")
def config_check(config: Config = None, as_json: Json = False) -> None:
    """Check the settings and plan every model, without starting anything."""
    from supervisor.cli.config import check as call

    finish("config check", lambda: call(config), as_json=as_json)


@config_commands.command("show")
def config_show(config: Config = None, as_json: Json = False) -> None:
    """Show the value and origin of every setting."""
    from supervisor.cli.config import show_settings as call

    finish("config show", lambda: call(config), as_json=as_json)


@config_commands.command("path")
def config_path(config: Config = None, as_json: Json = False) -> None:
    """Show the settings file and all directories."""
    from supervisor.cli.config import paths as call

    finish("config path", lambda: call(config), as_json=as_json)


@config_commands.command("set")
def config_set(
    key: SettingKey,
    value: Annotated[str, typer.Argument(help="A TOML value, or a text without quotes.")],
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Set one value in corral.toml; its comments stay, and invalid settings are refused."""
    from supervisor.cli.config import set_value as call

    finish("config set", lambda: call(key, value, config), as_json=as_json)


@config_commands.command("unset")
def config_unset(key: SettingKey, config: Config = None, as_json: Json = False) -> None:
    """Take one value or table out of corral.toml; its comments stay."""
    from supervisor.cli.config import unset_value as call

    finish("config unset", lambda: call(key, config), as_json=as_json)


@config_commands.command("schema")
def config_schema(
    write: Annotated[
        bool,
        typer.Option(
            "--write", help="Write it beside corral.toml, and name it in corral.toml for editors."
        ),
    ] = False,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Show the JSON Schema of corral.toml, with the meaning of every setting."""
    from supervisor.cli.config import schema, write_schema

    finish("config schema", lambda: write_schema(config) if write else schema(), as_json=as_json)


key_commands = typer.Typer(help="API keys of clients.", no_args_is_help=True)


@key_commands.command("add")
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
        typer.Option(help="batch: all interactive requests go first."),
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
        int | None, typer.Option(min=1, help="Tokens of a prompt plus the requested answer.")
    ] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Create a random API key, print it once, and store only its SHA-256.

    A running daemon accepts it within a second.
    """
    from proxy.auth.keys_file import Key
    from supervisor.cli.key import add as call

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


@key_commands.command("list")
def key_list(config: Config = None, as_json: Json = False) -> None:
    """List the API keys with their limits."""
    from supervisor.cli.key import list_keys as call

    finish("key list", lambda: call(config), as_json=as_json)


@key_commands.command("remove")
def key_remove(
    name: Annotated[str, typer.Argument(autocompletion=offer("key"))],
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Remove an API key; a running daemon rejects it within a second."""
    from supervisor.cli.key import remove as call

    finish("key remove", lambda: call(name, config), as_json=as_json)


hooks_commands = typer.Typer(help="Commands run on events.", invoke_without_command=True)


@hooks_commands.callback()
def hooks(context: typer.Context, config: Config = None, as_json: Json = False) -> None:
    """List the commands that [hooks] of corral.toml runs when something happens."""
    if context.invoked_subcommand is None:
        from supervisor.cli.key import list_hooks as call

        finish("hooks", lambda: call(config), as_json=as_json)


@hooks_commands.command("test")
def hooks_test(
    name: Annotated[
        str,
        typer.Argument(metavar="HOOK", help="As model_loaded.", autocompletion=offer("hook")),
    ],
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Run the commands of a hook with an example event, and show what they print."""
    from supervisor.cli.key import try_hook as call

    finish("hooks test", lambda: call(name, config), as_json=as_json)


Build = Annotated[
    str,
    typer.Argument(
        metavar="BUILD",
        help="Such as b10434 or b10434-vulkan.",
        autocompletion=offer("engine"),
    ),
]
Wanted = Annotated[
    str,
    typer.Argument(
        metavar="BUILD",
        help="A build such as b11434, a version such as v0.5.0, stable (the latest version), or "
        "newest (the newest build).",
    ),
]

# The same as `supervisor.daemon.model_commands.LIMIT_MAX_S`, which is slow to import.
_LIMIT_MAX_S: Final = 31 * 86_400


def _share(text: str) -> float:
    """Parse a share such as `10%` or `0.1`; raises BadParameter."""
    number = text.strip()
    try:
        return float(number[:-1]) / 100 if number.endswith("%") else float(number)
    except ValueError as error:
        raise typer.BadParameter(f"{text} is no share; write 10% or 0.1") from error


engine_commands = typer.Typer(help="llama-server binaries on this machine.", no_args_is_help=True)


@engine_commands.command("list")
def engine_list(config: Config = None, as_json: Json = False) -> None:
    """List all llama-server builds found; the first is the one in use."""
    from supervisor.cli.engine import list_engines as call

    finish("engine list", lambda: call(config), as_json=as_json)


@engine_commands.command("path")
def engine_path(config: Config = None, as_json: Json = False) -> None:
    """Print the path of the llama-server in use."""
    from supervisor.cli.engine import path as call

    finish("engine path", lambda: call(config), as_json=as_json)


@engine_commands.command("help")
def engine_help(
    flag: Annotated[str | None, typer.Argument(help="One flag; none means all.")] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Show the options of the llama-server in use, read from its --help."""
    from supervisor.cli.engine import show_help as call

    finish("engine help", lambda: call(flag, config), as_json=as_json)


@engine_commands.command("install")
def engine_install(
    wanted: Wanted = "stable",
    variant: Annotated[
        Literal["cpu", "vulkan", "cuda", "rocm", "metal"] | None,
        typer.Option("--variant", help="The backend. Unset: the best for this machine."),
    ] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Install a release of llama.cpp beside the installed ones."""
    from supervisor.cli.engine import install as call

    finish("engine install", lambda: call(wanted, variant, config), as_json=as_json)


@engine_commands.command("update")
def engine_update(wanted: Wanted = "stable", config: Config = None, as_json: Json = False) -> None:
    """Install the newest release and use it; `rollback` returns to the previous build."""
    from supervisor.cli.engine import update as call

    finish("engine update", lambda: call(wanted, config), as_json=as_json)


@engine_commands.command("use")
def engine_use(name: Build, config: Config = None, as_json: Json = False) -> None:
    """Use an installed build from each model's next start; `corral reload` applies it at once."""
    from supervisor.cli.engine import use as call

    finish("engine use", lambda: call(name, config), as_json=as_json)


@engine_commands.command("rollback")
def engine_rollback(config: Config = None, as_json: Json = False) -> None:
    """Use the previous build; each further rollback returns to the build before that."""
    from supervisor.cli.engine import rollback as call

    finish("engine rollback", lambda: call(config), as_json=as_json)


@engine_commands.command("remove")
def engine_remove(name: Build, config: Config = None, as_json: Json = False) -> None:
    """Remove an installed build that nothing uses."""
    from supervisor.cli.engine import remove as call

    finish("engine remove", lambda: call(name, config), as_json=as_json)


@engine_commands.command("canary")
def engine_canary(  # noqa: PLR0913, PLR0917 (a command has its options)
    build: Annotated[
        str | None,
        typer.Argument(
            help="An installed build, or the path of a llama-server.",
            autocompletion=offer("engine"),
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="A loaded model; the only one by default.")
    ] = None,
    share: Annotated[
        float,
        typer.Option(
            parser=_share, metavar="SHARE", help="Share of new conversations: 10% or 0.1."
        ),
    ] = "10%",  # type: ignore[assignment]
    limit_s: Annotated[
        float | None,
        typer.Option(
            "--for", parser=read_seconds, metavar="TIME", help="Decide after 90s, 10m or 2h."
        ),
    ] = None,
    margin: Annotated[
        float,
        typer.Option(parser=_share, metavar="SHARE", help="How much slower it may be."),
    ] = "20%",  # type: ignore[assignment]
    promote: Annotated[
        bool, typer.Option("--promote", help="Make it the model's own engine.")
    ] = False,
    withdraw: Annotated[bool, typer.Option("--withdraw", help="End it.")] = False,
    as_json: Json = False,
) -> None:
    """Try another build on a share of a model's conversations; without options, show the figures.

    One replica of the model runs it. A crash, more errors, or less speed than the margin allows
    withdraw it. At the end of --for it is promoted if the figures exclude all that: every replica
    moves to it, and corral.toml keeps it. No answer is cut.
    """
    from supervisor.cli import trial

    if sum((build is not None, promote, withdraw)) > 1:
        raise typer.BadParameter("give a build, --promote or --withdraw, not two of them")
    if not 0 < share < 1:
        raise typer.BadParameter("--share is above 0% and below 100%")
    if limit_s is not None and not 0 < limit_s <= _LIMIT_MAX_S:
        raise typer.BadParameter("--for is above 0s and at most 31d")
    if not 0 <= margin <= 1:
        raise typer.BadParameter("--margin is from 0% to 100%")

    def call() -> CommandResult:
        if promote or withdraw:
            return trial.end(model, is_promoted=promote)
        if build:
            return trial.start(build, model, share=share, limit_s=limit_s, margin=margin)
        return trial.show_canaries()

    finish("engine canary", call, as_json=as_json)


model_commands = typer.Typer(help="GGUF files.", no_args_is_help=True)


@model_commands.command("get")
def model_get(
    name: Annotated[
        str, typer.Argument(metavar="MODEL", help="OWNER/NAME[:QUANT], a URL, or a pinned name.")
    ],
    projector: Annotated[bool, typer.Option(help="Fetch the model's projector too.")] = True,
    draft: Annotated[bool, typer.Option(help="Fetch its draft model or draft heads too.")] = True,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the files; fetch nothing.")
    ] = False,
    as_lines: Annotated[bool, typer.Option("--lines", hidden=True)] = False,
    as_json: Json = False,
) -> None:
    """Download a model, unless it is complete already.

    Without QUANT, the quantisation that fits this machine is chosen. A broken download continues.
    """
    from supervisor.cli.model import get as call
    from supervisor.cli.targets import GetOptions

    options = GetOptions(projector, draft, dry_run, as_lines)
    finish("model get", lambda: call(name, options), as_json=as_json)


@model_commands.command("search")
def model_search(
    words: Annotated[list[str], typer.Argument(metavar="WORD...", help="Words of the name.")],
    limit: Annotated[int, typer.Option(min=1, max=50, help="How many to show.")] = 10,
    as_json: Json = False,
) -> None:
    """Search the hub for GGUF models; the most downloaded first."""
    from supervisor.cli.model import search as call

    finish("model search", lambda: call(" ".join(words), limit), as_json=as_json)


@model_commands.command("list")
def model_list(config: Config = None, as_json: Json = False) -> None:
    """List the models on this machine, wherever they are stored, and their sizes.

    Searches our own directory, those of `models_dir`, the Hugging Face cache, and the stores of
    llama.cpp, LM Studio and Ollama. `corral start NAME` serves any of them.
    """
    from supervisor.cli.model import list_models as call

    finish("model list", lambda: call(config), as_json=as_json)


@model_commands.command("show")
def model_show(file: str, as_json: Json = False) -> None:
    """Show the metadata of a GGUF file."""
    from supervisor.cli.model import show_model as call

    finish("model show", lambda: call(file), as_json=as_json)


@model_commands.command("remove")
def model_remove(
    name: Annotated[str, typer.Argument(help="A name of `corral model list`.")],
    yes: Yes = False,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Delete a downloaded model, unless an engine serves it or another program keeps it."""
    from supervisor.cli.model import remove as call

    finish("model remove", lambda: call(name, config, ask(), yes=yes), as_json=as_json)


@model_commands.command("prune")
def model_prune(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show, and delete nothing.")] = False,
    yes: Yes = False,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Delete unfinished downloads, and files of models that nothing uses."""
    from supervisor.cli.model import prune as call

    finish("model prune", lambda: call(config, ask(), yes=yes, dry_run=dry_run), as_json=as_json)


profile_commands = typer.Typer(help="Named sets of tuned flags.", no_args_is_help=True)


@profile_commands.command("list")
def profile_list(as_json: Json = False) -> None:
    """List the profiles, shipped and your own."""
    from supervisor.cli.config import list_profiles as call

    finish("profile list", call, as_json=as_json)


@profile_commands.command("show")
def profile_show(
    name: Annotated[str, typer.Argument(autocompletion=offer("profile"))], as_json: Json = False
) -> None:
    """Show a profile's flags, with those it inherits."""
    from supervisor.cli.config import show_profile as call

    finish("profile show", lambda: call(name), as_json=as_json)


@profile_commands.command("check")
def profile_check(
    name: Annotated[
        str | None,
        typer.Argument(help="One profile; none means all.", autocompletion=offer("profile")),
    ] = None,
    config: Config = None,
    as_json: Json = False,
) -> None:
    """Check profiles against the llama-server in use."""
    from supervisor.cli.config import check_profiles as call

    finish("profile check", lambda: call(name, config), as_json=as_json)
