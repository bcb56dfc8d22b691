"""`corral engine canary`: another engine on a share of a model's conversations."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.commands.trial import figure_lines
from supervisor.control.canary_request import engine_setting
from supervisor.control.client import Client
from supervisor.control.running import last_message, resolve_running
from supervisor.control.trial_messages import CanariesStatus, CanaryStatus, EndedCanaryStatus
from supervisor.engines import discover as engines
from supervisor.engines import search
from supervisor.engines.installed import EngineSetting, find_build
from supervisor.errors import AccessDenied, CorralError, SettingsInvalid
from supervisor.host.files import expanded
from supervisor.host.paths import directories
from supervisor.output import CommandResult, colored, duration

_HINT: Final = "corral engine canary BUILD --model MODEL starts one"


@dataclass(frozen=True, slots=True)
class CanaryOptions:
    """`limit_s`: None for a canary that only a command ends."""

    share: float
    limit_s: float | None
    margin: float


def show() -> CommandResult:
    found = Client(directories().control_socket).canaries()
    return CommandResult(found, _render(found))


def start(build: str, word: str | None, options: CanaryOptions) -> CommandResult:
    """Start a canary of a build; returns when it serves."""
    client = Client(directories().control_socket)
    engine, model = _engine(build), _model(client, word)
    body = {
        "engine": str(engine),
        "share": options.share,
        "limit_s": options.limit_s,
        "margin": options.margin,
    }
    found = last_message(client.start_canary(model, body))["canaries"]
    return CommandResult(found, "\n".join(_running_lines(_of(found, model))))


def end(word: str | None, *, is_promoted: bool) -> CommandResult:
    """Promote or withdraw a canary; returns when that is done."""
    client = Client(directories().control_socket)
    running = _of(client.canaries(), _model(client, word, of_canaries=True))
    model, engine = running["model"], running["engine"]
    try:
        found = last_message(client.end_canary(model, is_promoted=is_promoted))["canaries"]
    except AccessDenied:
        if not is_promoted:
            raise
        found = _promote_as_user(client, model, engine_setting(engine))
    notes = (f"{model} runs {engine} now: {_settings_file(client)} says so",) if is_promoted else ()
    return CommandResult(found, _ended_line(found["ended"][-1]), notes)


def _promote_as_user(client: Client, model: str, engine: EngineSetting) -> CanariesStatus:
    """Change the settings file where the daemon may not, as a service of systemd may not."""
    from supervisor.canary.promotion import with_engine
    from supervisor.settings.edit import change_file

    path = _settings_file(client)
    changed = change_file(path, lambda text: with_engine(text, model, engine))
    try:
        return last_message(client.end_canary(model, is_promoted=True))["canaries"]
    except CorralError:
        changed.restore()
        with suppress(CorralError):
            last_message(client.reload(dry_run=False))
        raise


def _settings_file(client: Client) -> Path:
    if (config := client.status()["config"]) is None:
        raise SettingsInvalid("the daemon was started without a settings file")
    return Path(config).resolve()


def _engine(build: str) -> EngineSetting:
    """Return the build that is meant: installed, a program, or the directory of one.

    Raises:
        EngineMissing, EngineBroken: There is none, or it does not run.
    """
    where, setting = directories(), engine_setting(build)
    if isinstance(setting, Path):
        setting = expanded(setting).absolute()
        inside = (setting / name for name in search.PROGRAMS)
        setting = next((one for one in inside if one.is_file()), setting)
    else:
        setting = find_build(setting, where.engines).name
    engines.load(setting, cache_dir=where.cache, places=search.here(where.engines))
    return setting


def _model(client: Client, word: str | None, *, of_canaries: bool = False) -> str:
    """Return the model that is meant; the only one where none is named."""
    if word is not None:
        return resolve_running([word], client.status())[0]
    if of_canaries:
        names = [one["model"] for one in client.canaries()["running"]]
    else:
        names = [one["name"] for one in client.status()["models"]]
    if len(names) == 1:
        return names[0]
    if of_canaries and not names:
        raise CorralError("no model has a canary", hint=_HINT)
    raise SettingsInvalid("name a model with --model", hint=f"models: {', '.join(names) or 'none'}")


def _of(found: CanariesStatus, model: str) -> CanaryStatus:
    for one in found["running"]:
        if one["model"] == model:
            return one
    raise CorralError(f"{model} has no canary", hint=_HINT.replace("MODEL", model, 1))


def _render(found: CanariesStatus) -> str:
    parts = ["\n".join(_running_lines(one)) for one in found["running"]]
    if ended := found["ended"]:
        parts.append("\n".join(map(_ended_line, ended)))
    return "\n\n".join(parts) or f"no model has a canary; {_HINT}"


def _running_lines(found: CanaryStatus) -> list[str]:
    trial, share = found["trial"], f"{100 * found['share']:g} % of new conversations"
    names = ", ".join(trial["trial"]["instances"]) if trial else "its replica"
    lines = [
        f"{found['model']}: {names} serves {share} on {found['engine']}",
        f"instead of {found['own_engine'] or '-'}; {_when(found)}",
    ]
    if found["obstacle"]:
        lines.append(colored(f"not promoted by itself: {found['obstacle']}", "yellow"))
    return [*lines, "", *figure_lines(trial, "now", "canary")] if trial else lines


def _when(found: CanaryStatus) -> str:
    left_s = found["decides_in_s"]
    if left_s is None:
        return "corral engine canary --promote or --withdraw ends it"
    margin = f"{100 * found['margin']:g} %"
    return f"in {duration(left_s)} promoted, unless it may be slower by more than {margin}"


def _ended_line(found: EndedCanaryStatus) -> str:
    text = f"{found['model']}: {found['engine']} was {found['outcome']}: {found['reason']}"
    return f"{found['at']}  {text}"
