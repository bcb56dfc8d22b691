"""Declares the commands of settings, keys, hooks, engines, models and profiles."""

from __future__ import annotations

from typing import Annotated, Literal

from typer import Argument, BadParameter, Option, Typer

from supervisor.cli.options import LIMIT_MAX_S, Config, Models, Yes, read_seconds, verb, word
from supervisor.output import CommandResult

setup_commands = Typer()


@verb(setup_commands, "init.init")
def init(models: Models, force: bool = False, config: Config = None) -> None:
    """Write a commented corral.toml for this machine and its models.

    Args:
        force: Replace a settings file; a backup is kept.
    """


@verb(setup_commands, "init.import_settings", name="import")
def import_settings(
    source: Annotated[list[str], Argument(metavar="FILE | -- COMMAND...")],
    kind: Annotated[
        Literal["command", "llama-swap", "router", "modelfile"] | None, Option("--from")
    ] = None,
    write: bool = False,
    config: Config = None,
) -> None:
    """Convert settings of other programs to corral.toml.

    Lists the settings that have no equivalent.

    Args:
        source: A llama-swap YAML, a router preset (.ini), a Modelfile, a file with a command; -
            reads standard input. After two dashes: the words of a llama-server command.
        kind: Format of the settings. Unset: detected from the content.
        write: Write it into corral.toml, with a backup beside it.
    """


@verb(setup_commands)
def connect(
    client: Annotated[str | None, word("client", metavar="[CLIENT]")] = None,
    model: Annotated[str | None, word("model", "--model")] = None,
    small: Annotated[str | None, word("model", "--small")] = None,
    write: bool = False,
    undo: bool = False,
    check: Annotated[bool, Option("--check/--no-check")] = True,
) -> CommandResult:
    """Show, write or remove the settings of a client program.

    Args:
        client: A client program; none lists them.
        model: For most requests. Unset: the default model, or a loaded model.
        small: For short requests, such as titles. Unset: the same model.
        write: Check with one request, then write; each file has a backup.
        undo: Remove the settings of --write; the rest stays.
        check: With --write: send a request first.
    """
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

SettingKey = Annotated[str, word("setting", help="A dotted key: proxy.listen.", metavar="KEY")]


@verb(config_commands, "config.check")
def config_check(config: Config = None) -> None:
    """Check the settings and plan every model; start nothing."""


@verb(config_commands, "config.show_settings")
def config_show(config: Config = None) -> None:
    """Show the value and origin of every setting."""


@verb(config_commands, "config.get_value")
def config_get(key: SettingKey, config: Config = None) -> None:
    """Print the value of one setting, or of a table of them."""


@verb(config_commands, "config.paths")
def config_path(config: Config = None) -> None:
    """Show the settings file and all directories."""


@verb(config_commands, "config.set_value")
def config_set(key: SettingKey, value: str, config: Config = None) -> None:
    """Set one value in corral.toml; its comments stay.

    Invalid settings are refused.

    Args:
        value: A TOML value, or a text without quotes.
    """


@verb(config_commands, "config.unset_value")
def config_unset(key: SettingKey, config: Config = None) -> None:
    """Remove one value or table from corral.toml; its comments stay."""


@verb(config_commands, "config.schema")
def config_schema(write: bool = False, config: Config = None) -> None:
    """Show the JSON Schema of corral.toml.

    Args:
        write: Write it beside corral.toml, and name it in corral.toml for editors.
    """


key_commands = Typer(name="key", help="API keys of clients.", no_args_is_help=True)


@verb(key_commands)
def key_add(  # noqa: PLR0913, PLR0917 (a command has its options)
    name: str,
    models: Annotated[list[str] | None, word("model", "--model")] = None,
    in_flight: Annotated[int | None, Option(min=1, max=100_000)] = None,
    rpm: Annotated[int | None, Option(min=1, max=1_000_000)] = None,
    priority: Literal["interactive", "batch"] = "interactive",
    admin: bool = False,
    tools: bool = False,
    tokens_per_minute: Annotated[int | None, Option(min=1)] = None,
    tokens_per_day: Annotated[int | None, Option(min=1)] = None,
    max_context: Annotated[int | None, Option(min=1)] = None,
    config: Config = None,
) -> CommandResult:
    """Create a random API key, and print it once.

    Only its SHA-256 is stored. A running daemon accepts it within a second.

    Args:
        name: Its name in logs and limits.
        models: A model it may use; repeat for more. Unset: all.
        in_flight: Requests at once.
        rpm: Requests a minute.
        priority: batch: all interactive requests go first.
        admin: It may use the dashboard, and sees all requests.
        tools: It may use the tools of engines (engine_tools), and so run commands here.
        tokens_per_minute: Tokens of prompts and answers a minute.
        tokens_per_day: Tokens of prompts and answers a day.
        max_context: Tokens of a prompt plus the requested answer.
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
        tools=tools,
        tokens_per_minute=tokens_per_minute,
        tokens_per_day=tokens_per_day,
        max_context=max_context,
    )
    return call(key, config)


@verb(key_commands, "key.list_keys")
def key_list(config: Config = None) -> None:
    """List the API keys with their limits."""


@verb(key_commands, "key.remove")
def key_remove(name: Annotated[str, word("key")], config: Config = None) -> None:
    """Remove an API key; a running daemon rejects it within a second."""


hooks_commands = Typer(name="hooks", help="Commands run on events.", invoke_without_command=True)


@verb(hooks_commands, "key.list_hooks")
def hooks(config: Config = None) -> None:
    """List the commands that [hooks] of corral.toml runs when something happens."""


@verb(hooks_commands, "key.try_hook")
def hooks_test(hook: Annotated[str, word("hook", metavar="HOOK")], config: Config = None) -> None:
    """Run the commands of a hook with an example event.

    Args:
        hook: Such as model_loaded.
    """


Build = Annotated[str, word("engine", help="Such as b10434 or b10434-vulkan.", metavar="BUILD")]
Wanted = Annotated[
    str,
    Argument(
        metavar="BUILD",
        help="A build such as b11434, a version such as v0.5.0, stable (the latest version), or "
        "newest (the newest build).",
    ),
]


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


@verb(engine_commands, "engine.list_engines")
def engine_list(config: Config = None) -> None:
    """List all llama-server builds found; the first is the one in use."""


@verb(engine_commands, "engine.path")
def engine_path(config: Config = None) -> None:
    """Print the path of the llama-server in use."""


@verb(engine_commands, "engine.show_help")
def engine_help(
    name: Annotated[str | None, Argument(metavar="FLAG")] = None, config: Config = None
) -> None:
    """Show the options of the llama-server in use.

    Args:
        name: One flag; none means all.
    """


@verb(engine_commands, "engine.install")
def engine_install(
    wanted: Wanted = "stable",
    variant: Literal["cpu", "vulkan", "cuda", "rocm", "metal"] | None = None,
    config: Config = None,
) -> None:
    """Install a release of llama.cpp beside the installed ones.

    Args:
        variant: The backend. Unset: the best for this machine.
    """


@verb(engine_commands, "engine.build")
def engine_build(
    wanted: Annotated[str, Argument(metavar="BUILD", show_default=False)],
    jobs: Annotated[int | None, Option(min=1)] = None,
    config: Config = None,
) -> None:
    """Compile a build for this processor from its sources.

    It needs cmake and a C++ compiler.

    Args:
        wanted: Such as b11434, or newest.
        jobs: Compilers at a time. Unset: as many as cores and memory allow.
    """


@verb(engine_commands, "engine.update")
def engine_update(wanted: Wanted = "stable", config: Config = None) -> None:
    """Install the newest release and use it; rollback undoes that."""


@verb(engine_commands, "engine.use")
def engine_use(name: Build, config: Config = None) -> None:
    """Use an installed build from each model's next start.

    corral reload applies it at once.
    """


@verb(engine_commands, "engine.rollback")
def engine_rollback(config: Config = None) -> None:
    """Use the previous build.

    Each further rollback returns to the build before that.
    """


@verb(engine_commands, "engine.remove")
def engine_remove(name: Build, config: Config = None) -> None:
    """Remove an installed build that nothing uses."""


@verb(engine_commands)
def engine_canary(  # noqa: PLR0913, PLR0917 (a command has its options)
    build: Annotated[str | None, word("engine")] = None,
    model: str | None = None,
    share: Annotated[float, Option(parser=_share, metavar="SHARE")] = "10%",  # type: ignore[assignment]
    limit_s: Annotated[float | None, Option("--for", parser=read_seconds, metavar="TIME")] = None,
    margin: Annotated[float, Option(parser=_share, metavar="SHARE")] = "20%",  # type: ignore[assignment]
    promote: bool = False,
    withdraw: bool = False,
) -> CommandResult:
    """Try another build on a share of a model's conversations.

    Without options: show the figures. One replica of the model runs the build. The build is
    withdrawn after a crash, more errors, or less speed than the margin allows. At the end of --for
    it is promoted if the figures exclude all of these: every replica moves to the build, and
    corral.toml stores it. No answer is interrupted.

    Args:
        build: An installed build, or the path of a llama-server.
        model: A loaded model; the only one by default.
        share: Share of new conversations: 10% or 0.1.
        limit_s: Decide after 90s, 10m or 2h.
        margin: How much slower it may be.
        promote: Make it the model's own engine.
        withdraw: End it.
    """
    from supervisor.cli import trial

    if sum((build is not None, promote, withdraw)) > 1:
        raise BadParameter("give a build, --promote or --withdraw, not two of them")
    if not 0 < share < 1:
        raise BadParameter("--share is above 0% and below 100%")
    if limit_s is not None and not 0 < limit_s <= LIMIT_MAX_S:
        raise BadParameter("--for is above 0s and at most 31d")
    if not 0 <= margin <= 1:
        raise BadParameter("--margin is from 0% to 100%")
    if promote or withdraw:
        return trial.end(model, is_promoted=promote)
    if build:
        return trial.start(build, model, share=share, limit_s=limit_s, margin=margin)
    return trial.show_canaries()


model_commands = Typer(name="model", help="GGUF files.", no_args_is_help=True)


@verb(model_commands, "model.get")
def model_get(
    name: Annotated[str, Argument(metavar="MODEL")],
    projector: bool = True,
    draft: bool = True,
    dry_run: bool = False,
    as_lines: Annotated[bool, Option("--lines", hidden=True)] = False,
) -> None:
    """Download a model, unless it is complete already.

    Without QUANT, the quantisation that fits this machine is chosen. A broken download continues.

    Args:
        name: OWNER/NAME[:QUANT], a URL, or a pinned name.
        projector: Fetch the model's projector too.
        draft: Fetch its draft model or draft heads too.
        dry_run: Show the files; fetch nothing.
    """


@verb(model_commands, "model.search")
def model_search(
    words: Annotated[list[str], Argument(metavar="WORD...")],
    limit: Annotated[int, Option(min=1, max=50)] = 10,
) -> None:
    """Search the hub for GGUF models; the most downloaded first.

    Args:
        words: Words of the name.
        limit: How many to show.
    """


@verb(model_commands, "model.list_models")
def model_list(config: Config = None) -> None:
    """List the models on this machine, wherever they are stored.

    Searches our own directory, those of `models_dir`, the Hugging Face cache, and the stores of
    llama.cpp, LM Studio and Ollama. `corral start NAME` serves any of them.
    """


@verb(model_commands, "model.show_model")
def model_show(file: str) -> None:
    """Show the metadata of a GGUF file."""


@verb(model_commands, "model.remove")
def model_remove(name: str, yes: Yes = False, config: Config = None) -> None:
    """Delete a downloaded model, unless something uses it.

    Args:
        name: A name of `corral model list`.
    """


@verb(model_commands, "model.prune")
def model_prune(dry_run: bool = False, yes: Yes = False, config: Config = None) -> None:
    """Delete unfinished downloads, and models that nothing uses.

    Args:
        dry_run: Show what would be deleted; delete nothing.
    """


profile_commands = Typer(name="profile", help="Named sets of tuned flags.", no_args_is_help=True)


@verb(profile_commands, "config.list_profiles")
def profile_list() -> None:
    """List the profiles, shipped and your own."""


@verb(profile_commands, "config.show_profile")
def profile_show(name: Annotated[str, word("profile")]) -> None:
    """Show a profile's flags, with those it inherits."""


@verb(profile_commands, "config.check_profiles")
def profile_check(
    name: Annotated[str | None, word("profile")] = None, config: Config = None
) -> None:
    """Check profiles against the llama-server in use.

    Args:
        name: One profile; none means all.
    """
