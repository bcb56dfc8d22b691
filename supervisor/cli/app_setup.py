"""Declares the commands of settings, keys, hooks, engines, models and profiles."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from typer import Argument, BadParameter, Option, Typer

from supervisor.cli.options import Config, Models, Yes, ask, flag, read_seconds, verb, word
from supervisor.output import CommandResult

setup_commands = Typer()


@verb(setup_commands)
def init(
    models: Models = None,
    force: Annotated[bool, flag("--force", "Replace a settings file; a backup is kept.")] = False,
    config: Config = None,
) -> CommandResult:
    """Write a commented corral.toml for this machine and the models that are stored here."""
    from supervisor.cli.init import init as call

    return call(models or [], config, is_forced=force)


@verb(setup_commands, "import")
def import_settings(
    source: Annotated[
        list[str],
        Argument(
            metavar="FILE | -- COMMAND...",
            help="A llama-swap YAML, a router preset (.ini), a Modelfile, a file with a command; "
            "- reads standard input. After two dashes: the words of a llama-server command.",
        ),
    ],
    kind: Annotated[
        Literal["command", "llama-swap", "router", "modelfile"] | None,
        Option("--from", help="Its format. Unset: detected from the content."),
    ] = None,
    write: Annotated[
        bool, flag("--write", "Write it into corral.toml, with a backup beside it.")
    ] = False,
    config: Config = None,
) -> CommandResult:
    """Turn settings of other programs into corral.toml, and list what has no equivalent."""
    from supervisor.cli.init import import_settings as call

    return call(source, kind, config, is_written=write)


@verb(setup_commands)
def connect(
    client: Annotated[
        str | None, word("client", "A client program; none lists them.", metavar="[CLIENT]")
    ] = None,
    model: Annotated[
        str | None,
        word("model", "For most requests. Unset: the default model, or a loaded model.", "--model"),
    ] = None,
    small: Annotated[
        str | None,
        word("model", "For short requests, such as titles. Unset: the same model.", "--small"),
    ] = None,
    write: Annotated[
        bool, flag("--write", "Check with one request, then write; each file has a backup.")
    ] = False,
    undo: Annotated[
        bool, flag("--undo", "Remove the settings of --write; the rest stays.")
    ] = False,
    check: Annotated[
        bool, Option("--check/--no-check", help="With --write: send a request first.")
    ] = True,
) -> CommandResult:
    """Show a client's settings for the running daemon, write them, or remove them again."""
    from supervisor.cli import connect as calls

    if client is None:
        if write or undo:
            raise BadParameter("--write and --undo need a CLIENT")
        return calls.list_clients()
    if write and undo:
        raise BadParameter("choose one of --write and --undo")
    if undo:
        return calls.undo(client)
    if write:
        return calls.write(client, model, small, checks=check)
    return calls.show(client, model, small)


config_commands = Typer(name="config", help="The settings file, corral.toml.", no_args_is_help=True)

SettingKey = Annotated[str, word("setting", "A dotted key, as proxy.listen.", metavar="KEY")]


@verb(config_commands, "check")
def config_check(config: Config = None) -> CommandResult:
    """Check the settings and plan every model, without starting anything."""
    from supervisor.cli.config import check as call

    return call(config)


@verb(config_commands, "show")
def config_show(config: Config = None) -> CommandResult:
    """Show the value and origin of every setting."""
    from supervisor.cli.config import show_settings as call

    return call(config)


@verb(config_commands, "path")
def config_path(config: Config = None) -> CommandResult:
    """Show the settings file and all directories."""
    from supervisor.cli.config import paths as call

    return call(config)


@verb(config_commands, "set")
def config_set(
    key: SettingKey,
    value: Annotated[str, Argument(help="A TOML value, or a text without quotes.")],
    config: Config = None,
) -> CommandResult:
    """Set one value in corral.toml; its comments stay, and invalid settings are refused."""
    from supervisor.cli.config import set_value as call

    return call(key, value, config)


@verb(config_commands, "unset")
def config_unset(key: SettingKey, config: Config = None) -> CommandResult:
    """Take one value or table out of corral.toml; its comments stay."""
    from supervisor.cli.config import unset_value as call

    return call(key, config)


@verb(config_commands, "schema")
def config_schema(
    write: Annotated[
        bool,
        flag("--write", "Write it beside corral.toml, and name it in corral.toml for editors."),
    ] = False,
    config: Config = None,
) -> CommandResult:
    """Show the JSON Schema of corral.toml, with the meaning of every setting."""
    from supervisor.cli.config import schema, write_schema

    return write_schema(config) if write else schema()


key_commands = Typer(name="key", help="API keys of clients.", no_args_is_help=True)


@verb(key_commands, "add")
def key_add(  # noqa: PLR0913, PLR0917 (a command has its options)
    name: Annotated[str, Argument(help="Its name in logs and limits.")],
    models: Annotated[
        list[str] | None,
        word("model", "A model it may use; repeat for more. Unset: all.", "--model"),
    ] = None,
    in_flight: Annotated[int | None, Option(min=1, max=100_000, help="Requests at once.")] = None,
    rpm: Annotated[int | None, Option(min=1, max=1_000_000, help="Requests a minute.")] = None,
    priority: Annotated[
        Literal["interactive", "batch"], Option(help="batch: all interactive requests go first.")
    ] = "interactive",
    admin: Annotated[
        bool, flag("--admin", "It may use the dashboard, and sees all requests.")
    ] = False,
    tokens_per_minute: Annotated[
        int | None, Option(min=1, help="Tokens of prompts and answers a minute.")
    ] = None,
    tokens_per_day: Annotated[
        int | None, Option(min=1, help="Tokens of prompts and answers a day.")
    ] = None,
    max_context: Annotated[
        int | None, Option(min=1, help="Tokens of a prompt plus the requested answer.")
    ] = None,
    config: Config = None,
) -> CommandResult:
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
    return call(key, config)


@verb(key_commands, "list")
def key_list(config: Config = None) -> CommandResult:
    """List the API keys with their limits."""
    from supervisor.cli.key import list_keys as call

    return call(config)


@verb(key_commands, "remove")
def key_remove(name: Annotated[str, word("key")], config: Config = None) -> CommandResult:
    """Remove an API key; a running daemon rejects it within a second."""
    from supervisor.cli.key import remove as call

    return call(name, config)


hooks_commands = Typer(name="hooks", help="Commands run on events.", invoke_without_command=True)


@verb(hooks_commands, is_group=True)
def hooks(config: Config = None) -> CommandResult:
    """List the commands that [hooks] of corral.toml runs when something happens."""
    from supervisor.cli.key import list_hooks as call

    return call(config)


@verb(hooks_commands, "test")
def hooks_test(
    name: Annotated[str, word("hook", "As model_loaded.", metavar="HOOK")], config: Config = None
) -> CommandResult:
    """Run the commands of a hook with an example event, and show what they print."""
    from supervisor.cli.key import try_hook as call

    return call(name, config)


Build = Annotated[str, word("engine", "Such as b10434 or b10434-vulkan.", metavar="BUILD")]
Wanted = Annotated[
    str,
    Argument(
        metavar="BUILD",
        help="A build such as b11434, a version such as v0.5.0, stable (the latest version), or "
        "newest (the newest build).",
    ),
]

# The same as `supervisor.daemon.operations.LIMIT_MAX_S`, which is slow to import.
_LIMIT_MAX_S: Final = 31 * 86_400


def _share(text: str) -> float:
    """Parse a share such as `10%` or `0.1`; raises BadParameter."""
    number = text.strip()
    try:
        return float(number[:-1]) / 100 if number.endswith("%") else float(number)
    except ValueError as error:
        raise BadParameter(f"{text} is no share; write 10% or 0.1") from error


engine_commands = Typer(
    name="engine", help="llama-server binaries on this machine.", no_args_is_help=True
)


@verb(engine_commands, "list")
def engine_list(config: Config = None) -> CommandResult:
    """List all llama-server builds found; the first is the one in use."""
    from supervisor.cli.engine import list_engines as call

    return call(config)


@verb(engine_commands, "path")
def engine_path(config: Config = None) -> CommandResult:
    """Print the path of the llama-server in use."""
    from supervisor.cli.engine import path as call

    return call(config)


@verb(engine_commands, "help")
def engine_help(
    flag: Annotated[str | None, Argument(help="One flag; none means all.")] = None,
    config: Config = None,
) -> CommandResult:
    """Show the options of the llama-server in use, read from its --help."""
    from supervisor.cli.engine import show_help as call

    return call(flag, config)


@verb(engine_commands, "install")
def engine_install(
    wanted: Wanted = "stable",
    variant: Annotated[
        Literal["cpu", "vulkan", "cuda", "rocm", "metal"] | None,
        Option("--variant", help="The backend. Unset: the best for this machine."),
    ] = None,
    config: Config = None,
) -> CommandResult:
    """Install a release of llama.cpp beside the installed ones."""
    from supervisor.cli.engine import install as call

    return call(wanted, variant, config)


@verb(engine_commands, "update")
def engine_update(wanted: Wanted = "stable", config: Config = None) -> CommandResult:
    """Install the newest release and use it; `rollback` returns to the previous build."""
    from supervisor.cli.engine import update as call

    return call(wanted, config)


@verb(engine_commands, "use")
def engine_use(name: Build, config: Config = None) -> CommandResult:
    """Use an installed build from each model's next start; `corral reload` applies it at once."""
    from supervisor.cli.engine import use as call

    return call(name, config)


@verb(engine_commands, "rollback")
def engine_rollback(config: Config = None) -> CommandResult:
    """Use the previous build; each further rollback returns to the build before that."""
    from supervisor.cli.engine import rollback as call

    return call(config)


@verb(engine_commands, "remove")
def engine_remove(name: Build, config: Config = None) -> CommandResult:
    """Remove an installed build that nothing uses."""
    from supervisor.cli.engine import remove as call

    return call(name, config)


@verb(engine_commands, "canary")
def engine_canary(  # noqa: PLR0913, PLR0917 (a command has its options)
    build: Annotated[
        str | None, word("engine", "An installed build, or the path of a llama-server.")
    ] = None,
    model: Annotated[
        str | None, Option("--model", help="A loaded model; the only one by default.")
    ] = None,
    share: Annotated[
        float,
        Option(parser=_share, metavar="SHARE", help="Share of new conversations: 10% or 0.1."),
    ] = "10%",  # type: ignore[assignment]
    limit_s: Annotated[
        float | None,
        Option("--for", parser=read_seconds, metavar="TIME", help="Decide after 90s, 10m or 2h."),
    ] = None,
    margin: Annotated[
        float, Option(parser=_share, metavar="SHARE", help="How much slower it may be.")
    ] = "20%",  # type: ignore[assignment]
    promote: Annotated[bool, flag("--promote", "Make it the model's own engine.")] = False,
    withdraw: Annotated[bool, flag("--withdraw", "End it.")] = False,
) -> CommandResult:
    """Try another build on a share of a model's conversations; without options, show the figures.

    One replica of the model runs it. A crash, more errors, or less speed than the margin allows
    withdraw it. At the end of --for it is promoted if the figures exclude all that: every replica
    moves to it, and corral.toml keeps it. No answer is cut.
    """
    from supervisor.cli import trial

    if sum((build is not None, promote, withdraw)) > 1:
        raise BadParameter("give a build, --promote or --withdraw, not two of them")
    if not 0 < share < 1:
        raise BadParameter("--share is above 0% and below 100%")
    if limit_s is not None and not 0 < limit_s <= _LIMIT_MAX_S:
        raise BadParameter("--for is above 0s and at most 31d")
    if not 0 <= margin <= 1:
        raise BadParameter("--margin is from 0% to 100%")
    if promote or withdraw:
        return trial.end(model, is_promoted=promote)
    if build:
        return trial.start(build, model, share=share, limit_s=limit_s, margin=margin)
    return trial.show_canaries()


model_commands = Typer(name="model", help="GGUF files.", no_args_is_help=True)


@verb(model_commands, "get")
def model_get(
    name: Annotated[
        str, Argument(metavar="MODEL", help="OWNER/NAME[:QUANT], a URL, or a pinned name.")
    ],
    projector: Annotated[bool, Option(help="Fetch the model's projector too.")] = True,
    draft: Annotated[bool, Option(help="Fetch its draft model or draft heads too.")] = True,
    dry_run: Annotated[bool, flag("--dry-run", "Show the files; fetch nothing.")] = False,
    as_lines: Annotated[bool, Option("--lines", hidden=True)] = False,
) -> CommandResult:
    """Download a model, unless it is complete already.

    Without QUANT, the quantisation that fits this machine is chosen. A broken download continues.
    """
    from supervisor.cli.model import get as call

    companions = {"projector": projector, "draft": draft}
    left_out = [kind for kind, is_wanted in companions.items() if not is_wanted]
    return call(name, left_out, dry_run=dry_run, as_lines=as_lines)


@verb(model_commands, "search")
def model_search(
    words: Annotated[list[str], Argument(metavar="WORD...", help="Words of the name.")],
    limit: Annotated[int, Option(min=1, max=50, help="How many to show.")] = 10,
) -> CommandResult:
    """Search the hub for GGUF models; the most downloaded first."""
    from supervisor.cli.model import search as call

    return call(" ".join(words), limit)


@verb(model_commands, "list")
def model_list(config: Config = None) -> CommandResult:
    """List the models on this machine, wherever they are stored, and their sizes.

    Searches our own directory, those of `models_dir`, the Hugging Face cache, and the stores of
    llama.cpp, LM Studio and Ollama. `corral start NAME` serves any of them.
    """
    from supervisor.cli.model import list_models as call

    return call(config)


@verb(model_commands, "show")
def model_show(file: str) -> CommandResult:
    """Show the metadata of a GGUF file."""
    from supervisor.cli.model import show_model as call

    return call(file)


@verb(model_commands, "remove")
def model_remove(
    name: Annotated[str, Argument(help="A name of `corral model list`.")],
    yes: Yes = False,
    config: Config = None,
) -> CommandResult:
    """Delete a downloaded model, unless an engine serves it or another program keeps it."""
    from supervisor.cli.model import remove as call

    return call(name, config, ask(), yes=yes)


@verb(model_commands, "prune")
def model_prune(
    dry_run: Annotated[bool, flag("--dry-run", "Show, and delete nothing.")] = False,
    yes: Yes = False,
    config: Config = None,
) -> CommandResult:
    """Delete unfinished downloads, and files of models that nothing uses."""
    from supervisor.cli.model import prune as call

    return call(config, ask(), yes=yes, dry_run=dry_run)


profile_commands = Typer(name="profile", help="Named sets of tuned flags.", no_args_is_help=True)


@verb(profile_commands, "list")
def profile_list() -> CommandResult:
    """List the profiles, shipped and your own."""
    from supervisor.cli.config import list_profiles as call

    return call()


@verb(profile_commands, "show")
def profile_show(name: Annotated[str, word("profile")]) -> CommandResult:
    """Show a profile's flags, with those it inherits."""
    from supervisor.cli.config import show_profile as call

    return call(name)


@verb(profile_commands, "check")
def profile_check(
    name: Annotated[str | None, word("profile", "One profile; none means all.")] = None,
    config: Config = None,
) -> CommandResult:
    """Check profiles against the llama-server in use."""
    from supervisor.cli.config import check_profiles as call

    return call(name, config)
