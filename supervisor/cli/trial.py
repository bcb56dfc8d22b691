"""Implements `corral trial` and `corral engine canary`: compares two configurations of a model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from supervisor import errors
from supervisor.builds import discover
from supervisor.builds.installed import EngineSetting, engine_setting, find_build
from supervisor.cli.engine import load_engine
from supervisor.daemon import control_messages as messages
from supervisor.daemon.control_client import Client
from supervisor.daemon.model_commands import follow, resolve_running
from supervisor.output import CommandResult, colored, duration, size, table
from supervisor.settings.edit import ChangedFile, change_file, remove_trial
from supervisor.system.files import expand_home
from supervisor.system.paths import directories

_BUSY_TRIES: Final = 30
_BUSY_WAIT_S: Final = 1.0
_TOML: Final = '[models.NAME.trial] with profile = "…" and share = 0.2'


def show(word: str | None) -> CommandResult:
    client = Client(directories().control_socket)
    found = client.trials()
    if word is not None:
        found = [_find_trial(found, word, client.status())]
    if not found:
        hint = f"{_TOML} in corral.toml, then corral reload, starts one"
        return CommandResult(found, "no model has a trial", (hint,))
    return CommandResult(found, "\n\n".join(map(render, found)))


def finish(word: str | None, *, is_applied: bool) -> CommandResult:
    """End a model's trial in corral.toml, and reload; restores the file if the reload fails."""
    if word is None:
        raise errors.SettingsInvalid(
            "name a model", hint="corral trial shows the models with a trial"
        )
    client = Client(directories().control_socket)
    before = client.status()
    found = _find_trial(client.trials(), word, before)
    path = _settings_file(before)
    _check_applied(client, may_be_invalid=not is_applied)
    changed = change_file(path, lambda text: remove_trial(text, found.model, is_applied=is_applied))
    with _restoring(changed, client):
        report = _reload(client, dry_run=False)
        if failures := report.failures:
            first = failures[0]
            raise errors.StartFailed(
                f"nothing was changed: {first['message']}", hint=first["hint"], log=first["log"]
            )
    data = {
        "model": found.model,
        "applied": is_applied,
        "file": str(path),
        "backup": str(changed.backup),
        "lines": changed.lines,
        "reloaded": report,
    }
    name, own, tried = found.model, found.base.profile, found.trial.profile
    first_line = f"{name} runs {tried} now" if is_applied else f"{name} runs only {own} again"
    lines = [
        f"{first_line}; its trial is over",
        f"{path} was changed; {changed.backup.name} has the previous content:",
        *(f"  {line}" for line in changed.lines),
    ]
    was, now = _slot_tokens(before, name), _slot_tokens(client.status(), name)
    notes = (
        (f"a conversation of {name} may now have {now} tokens, before {was}",)
        if was and now and now < was
        else ()
    )
    return CommandResult(data, "\n".join(lines), notes)


@contextmanager
def _restoring(changed: ChangedFile, client: Client) -> Iterator[None]:
    """Take the change of a settings file back if the block fails."""
    try:
        yield
    except errors.Interrupted:  # the daemon continues to apply the changed file
        raise
    except errors.CorralError:
        changed.restore()
        with suppress(errors.CorralError):
            _reload(client, dry_run=False)
        raise


def _find_trial(
    found: list[messages.TrialStatus], word: str, status: messages.DaemonStatus
) -> messages.TrialStatus:
    (name,) = resolve_running([word], status)
    for trial in found:
        if trial.model == name:
            return trial
    raise errors.CorralError(
        f"{name} has no trial",
        hint=f"{_TOML.replace('NAME', name)} in corral.toml, then corral reload, starts one",
    )


def _settings_file(status: messages.DaemonStatus) -> Path:
    if status.config is None:
        raise errors.SettingsInvalid("the daemon was started without a settings file")
    return Path(status.config).resolve()


def _check_applied(client: Client, *, may_be_invalid: bool) -> None:
    """Raise SettingsInvalid if the file has changes that the daemon has not applied.

    An invalid trial can be ended; other errors in the file will fail the reload.
    """
    try:
        report = _reload(client, dry_run=True)
    except errors.SettingsInvalid:
        if may_be_invalid:
            return
        raise
    if names := [*report.added, *report.removed, *report.changed]:
        raise errors.SettingsInvalid(
            f"corral.toml has changes that are not applied yet, of {', '.join(names)}",
            hint="corral reload --dry-run shows them, corral reload applies them",
        )


def _reload(client: Client, *, dry_run: bool) -> messages.ReloadReport:
    """Reload; waits for a running reload, which `watch_settings` may have started."""
    for _ in range(_BUSY_TRIES - 1):
        try:
            return follow(client.reload(dry_run=dry_run))
        except errors.DaemonBusy:
            time.sleep(_BUSY_WAIT_S)
    return follow(client.reload(dry_run=dry_run))


def _slot_tokens(status: messages.DaemonStatus, name: str) -> int | None:
    for model in status.models:
        if model.name == name and model.ctx_size and model.slots:
            return model.ctx_size // model.slots
    return None


def render(found: messages.TrialStatus) -> str:
    own, tried = found.base.profile, found.trial.profile
    share = f"{100 * found.share:g} % of new conversations"
    state = f"{', '.join(found.trial.instances)} is {found.state}"
    since = f"figures of {duration(found.age_s)}"
    title = f"{found.model}: {tried} serves {share}; {state}; {since}"
    return "\n".join([title, "", *figure_lines(found, own, tried)])


def figure_lines(found: messages.TrialStatus, own: str, tried: str) -> list[str]:
    """Return the table of both sides, under these names, with errors, flags and notes."""
    base, trial = found.base, found.trial
    rate, first = found.tokens_per_second, found.first_token_s
    rows = [
        ("tokens/s", *_base_and_trial_text(found, "tokens_per_second", "{:.1f}"), rate.outcome),
        ("first token", *_base_and_trial_text(found, "first_token_s", "{:.2f} s"), first.outcome),
        ("memory", size(base.memory_bytes), size(trial.memory_bytes), ""),
        *(
            (name, getattr(base, name), getattr(trial, name), "")
            for name in ("conversations", "requests", "errors", "crashes")
        ),
    ]
    lines = [table(("", own.upper(), tried.upper(), "DIFFERENCE"), rows)]
    if error := found.error:
        lines += ["", colored(error["message"], "red")]
        lines += [f"  {label}: {error[label]}" for label in ("hint", "log") if error[label]]
    if differences := found.differences:
        lines += ["", f"{', '.join(trial.instances)} runs with"]
        lines += [
            f"  {flag.flag} {flag.trial or 'unset'} instead of {flag.base or 'unset'}"
            for flag in differences
        ]
    if found.notes:
        lines += ["", *found.notes]
    return lines


def _base_and_trial_text(found: messages.TrialStatus, name: str, style: str) -> tuple[str, str]:
    values = (getattr(found.base, name), getattr(found.trial, name))
    base, other = ("-" if value is None else style.format(value) for value in values)
    return base, other


_HINT: Final = "corral engine canary BUILD --model MODEL starts one"


def show_canaries() -> CommandResult:
    found = Client(directories().control_socket).canaries()
    parts = ["\n".join(_running_lines(canary)) for canary in found.running]
    if ended := found.ended:
        parts.append("\n".join(map(_ended_line, ended)))
    return CommandResult(found, "\n\n".join(parts) or f"no model has a canary; {_HINT}")


def start(
    build: str, word: str | None, *, share: float, limit_s: float | None, margin: float
) -> CommandResult:
    """Start a canary of a build; returns when it serves. `limit_s`: None if a command ends it."""
    client = Client(directories().control_socket)
    engine, model = _engine(build), _choose_model(client, word)
    found = follow(client.start_canary(model, str(engine), share, limit_s, margin))
    return CommandResult(found, "\n".join(_running_lines(_find_canary(found, model))))


def end(word: str | None, *, is_promoted: bool) -> CommandResult:
    client = Client(directories().control_socket)
    running = _find_canary(client.canaries(), _choose_model(client, word, of_canaries=True))
    model, engine = running.model, running.engine
    try:
        found = follow(client.end_canary(model, "promote" if is_promoted else "withdraw"))
    except errors.AccessDenied:
        if not is_promoted:
            raise
        found = _promote_as_user(client, model, engine_setting(engine))
    notes = (
        (f"{model} runs {engine} now, as set in {_settings_file(client.status())}",)
        if is_promoted
        else ()
    )
    return CommandResult(found, _ended_line(found.ended[-1]), notes)


def _promote_as_user(client: Client, model: str, engine: EngineSetting) -> messages.CanariesStatus:
    """Promote, and change the settings file, which a service of systemd may not write."""
    from supervisor.experiments.canaries import with_engine

    path = _settings_file(client.status())
    with _restoring(change_file(path, lambda text: with_engine(text, model, engine)), client):
        return follow(client.end_canary(model, "promote"))


def _engine(build: str) -> EngineSetting:
    """Return an installed build, or a program or its directory; raises EngineMissing or Broken."""
    setting = engine_setting(build)
    if isinstance(setting, Path):
        setting = expand_home(setting).absolute()
        inside = (setting / name for name in discover.PROGRAMS)
        setting = next((path for path in inside if path.is_file()), setting)
    else:
        setting = find_build(setting, directories().engines).name
    load_engine(setting)
    return setting


def _choose_model(client: Client, word: str | None, *, of_canaries: bool = False) -> str:
    """Return the named model; without a name, the only model."""
    if word is not None:
        return resolve_running([word], client.status())[0]
    if of_canaries:
        names = [canary.model for canary in client.canaries().running]
    else:
        names = [model.name for model in client.status().models]
    if len(names) == 1:
        return names[0]
    if of_canaries and not names:
        raise errors.CorralError("no model has a canary", hint=_HINT)
    raise errors.SettingsInvalid(
        "name a model with --model", hint=f"models: {', '.join(names) or 'none'}"
    )


def _find_canary(found: messages.CanariesStatus, model: str) -> messages.CanaryStatus:
    for canary in found.running:
        if canary.model == model:
            return canary
    raise errors.CorralError(f"{model} has no canary", hint=_HINT.replace("MODEL", model, 1))


def _running_lines(found: messages.CanaryStatus) -> list[str]:
    trial, share = found.trial, f"{100 * found.share:g} % of new conversations"
    names = ", ".join(trial.trial.instances) if trial else "its replica"
    lines = [
        f"{found.model}: {names} serves {share} on {found.engine}",
        f"instead of {found.own_engine or 'its own engine'}; {_deadline_text(found)}",
    ]
    if found.obstacle:
        lines.append(colored(f"not promoted automatically: {found.obstacle}", "yellow"))
    return [*lines, "", *figure_lines(trial, "now", "canary")] if trial else lines


def _deadline_text(found: messages.CanaryStatus) -> str:
    left_s = found.decides_in_s
    if left_s is None:
        return "corral engine canary --promote or --withdraw ends it"
    margin = f"{100 * found.margin:g} %"
    return f"promoted in {duration(left_s)}, unless it may be slower by more than {margin}"


def _ended_line(found: Mapping[str, str]) -> str:
    text = f"{found['model']}: {found['engine']} was {found['outcome']}: {found['reason']}"
    return f"{found['at']}  {text}"
