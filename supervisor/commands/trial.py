"""`corral trial`: what a live trial shows, and what becomes of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from supervisor.control.client import Client
from supervisor.control.messages import DaemonStatus, ReloadReport
from supervisor.control.running import last_message, resolve_running
from supervisor.control.trial_messages import FlagDifference, TrialStatus
from supervisor.errors import CorralError, DaemonBusy, Interrupted, SettingsInvalid, StartFailed
from supervisor.host.paths import directories
from supervisor.output import CommandResult, colored, duration, size, table
from supervisor.settings.edit import ChangedFile, change_file
from supervisor.trial.settings_edit import without_trial

_BUSY_TRIES: Final = 30
_BUSY_WAIT_S: Final = 1.0
_TOML: Final = '[models.NAME.trial] with profile = "…" and share = 0.2'


def show(word: str | None) -> CommandResult:
    """Show the trials of all models, or of one."""
    client = Client(directories().control_socket)
    found = client.trials()
    if word is not None:
        found = [_named(found, word, client.status())]
    if not found:
        hint = f"{_TOML} in corral.toml, then corral reload, starts one"
        return CommandResult(found, "no model has a trial", (hint,))
    return CommandResult(found, "\n\n".join(map(render, found)))


def finish(word: str | None, *, is_applied: bool) -> CommandResult:
    """End a model's trial in corral.toml, and reload; what does not start changes nothing."""
    if word is None:
        raise SettingsInvalid("name a model", hint="corral trial shows the models with a trial")
    client = Client(directories().control_socket)
    before = client.status()
    found = _named(client.trials(), word, before)
    path = _settings_file(before)
    _check_applied(client, may_be_invalid=not is_applied)
    changed = change_file(
        path, lambda text: without_trial(text, found["model"], is_applied=is_applied)
    )
    try:
        report = _reload(client, dry_run=False)
        _check_started(report)
    except Interrupted:  # the daemon goes on with what the file says now
        raise
    except CorralError:
        changed.restore()
        with suppress(CorralError):
            _reload(client, dry_run=False)
        raise
    data = {
        "model": found["model"],
        "applied": is_applied,
        "file": str(path),
        "backup": str(changed.backup),
        "lines": changed.lines,
        "reloaded": report,
    }
    notes = tuple(_context_notes(found["model"], before, client.status()))
    return CommandResult(data, _finished(found, changed, is_applied=is_applied), notes)


def _named(found: list[TrialStatus], word: str, status: DaemonStatus) -> TrialStatus:
    (name,) = resolve_running([word], status)
    for one in found:
        if one["model"] == name:
            return one
    raise CorralError(
        f"{name} has no trial",
        hint=f"{_TOML.replace('NAME', name)} in corral.toml, then corral reload, starts one",
    )


def _settings_file(status: DaemonStatus) -> Path:
    if status["config"] is None:
        raise SettingsInvalid("the daemon was started without a settings file")
    return Path(status["config"]).resolve()


def _check_applied(client: Client, *, may_be_invalid: bool) -> None:
    """Raise SettingsInvalid where the file has changes of which the daemon knows nothing yet.

    Even a trial that is invalid can be ended; what else is invalid fails the reload.
    """
    try:
        report = _reload(client, dry_run=True)
    except SettingsInvalid:
        if may_be_invalid:
            return
        raise
    if names := [*report["added"], *report["removed"], *report["changed"]]:
        raise SettingsInvalid(
            f"corral.toml has changes that are not applied yet, of {', '.join(names)}",
            hint="corral reload --dry-run shows them, corral reload applies them",
        )


def _reload(client: Client, *, dry_run: bool) -> ReloadReport:
    """Reload, after one that runs already: with `watch_settings` the daemon may be quicker."""
    for _ in range(_BUSY_TRIES - 1):
        try:
            return last_message(client.reload(dry_run=dry_run))["reloaded"]
        except DaemonBusy:
            time.sleep(_BUSY_WAIT_S)
    return last_message(client.reload(dry_run=dry_run))["reloaded"]


def _check_started(report: ReloadReport) -> None:
    if failures := report["failures"]:
        first = failures[0]
        raise StartFailed(
            f"nothing was changed: {first['message']}", hint=first["hint"], log=first["log"]
        )


def _context_notes(model: str, before: DaemonStatus, after: DaemonStatus) -> Iterator[str]:
    was, now = (_slot_tokens(status, model) for status in (before, after))
    if was and now and now < was:
        yield f"a conversation of {model} may now have {now} tokens, before {was}"


def _slot_tokens(status: DaemonStatus, name: str) -> int | None:
    for model in status["models"]:
        if model["name"] == name and model["ctx_size"] and model["slots"]:
            return model["ctx_size"] // model["slots"]
    return None


def _finished(found: TrialStatus, changed: ChangedFile, *, is_applied: bool) -> str:
    name, own, tried = found["model"], found["base"]["profile"], found["trial"]["profile"]
    first = f"{name} runs {tried} now" if is_applied else f"{name} runs only {own} again"
    changes = [f"  {line}" for line in changed.lines]
    kept = f"{changed.path} was changed; {changed.backup.name} is what it was:"
    return "\n".join([f"{first}; its trial is over", kept, *changes])


def render(found: TrialStatus) -> str:
    sides = (found["base"]["profile"], found["trial"]["profile"])
    return "\n".join([_title(found), "", *figure_lines(found, *sides)])


def figure_lines(found: TrialStatus, own: str, tried: str) -> list[str]:
    """Return the table of both sides, under these names, and what belongs to it."""
    base, trial = found["base"], found["trial"]
    rate, first = found["tokens_per_second"], found["first_token_s"]
    rows = [
        ("tokens/s", *_both(found, "tokens_per_second", "{:.1f}"), rate["outcome"]),
        ("first token", *_both(found, "first_token_s", "{:.2f} s"), first["outcome"]),
        ("memory", size(base["memory_bytes"]), size(trial["memory_bytes"]), ""),
        *(
            (name, str(base[name]), str(trial[name]), "")
            for name in ("conversations", "requests", "errors", "crashes")
        ),
    ]
    lines = [table(("", own.upper(), tried.upper(), "DIFFERENCE"), rows), *_problem(found)]
    if found["differences"]:
        lines += ["", f"{', '.join(trial['instances'])} runs with", *_flags(found["differences"])]
    if found["notes"]:
        lines += ["", *found["notes"]]
    return lines


def _title(found: TrialStatus) -> str:
    share = f"{100 * found['share']:g} % of new conversations"
    state = f"{', '.join(found['trial']['instances'])} is {found['state']}"
    since = f"figures of {duration(found['age_s'])}"
    return f"{found['model']}: {found['trial']['profile']} serves {share}; {state}; {since}"


def _both(found: TrialStatus, name: str, style: str) -> tuple[str, str]:
    values = (found["base"][name], found["trial"][name])  # type: ignore[literal-required]
    one, other = ("-" if value is None else style.format(value) for value in values)
    return one, other


def _flags(differences: list[FlagDifference]) -> list[str]:
    rows = [(one["flag"], one["base"] or "-", one["trial"] or "-") for one in differences]
    return [f"  {flag} {trial} instead of {base}" for flag, base, trial in rows]


def _problem(found: TrialStatus) -> list[str]:
    if (error := found["error"]) is None:
        return []
    more = [f"  {label}: {error[label]}" for label in ("hint", "log") if error[label]]
    return ["", colored(error["message"], "red"), *more]
