"""Implements `corral start`, `stop`, `restart`, `load`, `unload`, `reload`, `warm`, `balance`."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import urlsplit

import filelock

from supervisor import errors
from supervisor.cli.serve import settings_options, spawn_daemon
from supervisor.cli.status import reductions
from supervisor.cli.targets import additional_models, choose
from supervisor.daemon import control_messages as messages
from supervisor.daemon.control_client import Client
from supervisor.daemon.model_commands import follow, resolve_running, running_status, unknown_words
from supervisor.engine.prompts import read
from supervisor.output import CommandResult, colored, describe, table
from supervisor.plan.loras import absolute
from supervisor.settings.load import FILE_NAME
from supervisor.system.daemon_lock import read_owner
from supervisor.system.paths import Directories, directories


def stop(models: Sequence[str]) -> CommandResult:
    """Stop the named models, or the daemon; no error if nothing runs."""
    where = directories()
    try:
        if not models:
            return stop_daemon(where)
        return _take_down(Client(where.control_socket), "stop", "stopped", models)
    except errors.NotRunning:
        return CommandResult({"running": False}, "the daemon is not running")


def unload(models: Sequence[str]) -> CommandResult:
    return _take_down(Client(directories().control_socket), "unload", "unloaded", models)


def _take_down(client: Client, verb: str, done: str, words: Sequence[str]) -> CommandResult:
    status = client.status()
    names = resolve_running(words, status)
    shown = names or tuple(model.name for model in status.models)
    result = follow(client.command(verb, names))
    return CommandResult(result, "\n".join(f"{done}: {name}" for name in shown))


def stop_daemon(where: Directories, *, exit_timeout_s: float = 10.0) -> CommandResult:
    """Shut the daemon down; wait until it has ended the stream, released its lock and exited.

    After the last message it exits almost at once.
    """
    owner = read_owner(where.state_file)
    stream = Client(where.control_socket).shutdown()
    next(stream)
    with suppress(errors.DaemonBusy):  # the daemon exits, perhaps before its last message
        for _ in stream:
            pass
    has_exited = _is_lock_free(where, exit_timeout_s) and (
        owner is None or owner.wait(exit_timeout_s)
    )
    if not has_exited:
        raise errors.DaemonBusy(
            "the engines stopped, but the daemon's own process still runs or another started",
            hint="corral status shows which",
        )
    return CommandResult({"running": False}, "stopped")


def _is_lock_free(where: Directories, timeout_s: float) -> bool:
    """Wait for the lock of the runtime directory; return whether it was released in time."""
    try:
        with filelock.FileLock(where.lock_file, timeout=timeout_s, mode=0o600):
            return True
    except filelock.Timeout:
        return False


# Errors of settings that are found before a spawn keep their own exit code; other ends of an engine
# are failed starts.
_SETTINGS_CODES: Final = frozenset(
    {"settings_invalid", "engine_missing", "engine_broken", "model_invalid"}
    | {"no_room", "state_denied", "worker_mismatch"}
)
# Time that a daemon may hold its lock before it answers, and the interval of polls.
_ANSWER_TIMEOUT_S: Final = 5.0
_POLL_S: Final = 0.05


def start(
    models: Sequence[str],
    config: Path | None,
    listen: str | None,
    *,
    wait: bool,
    changes: Mapping[str, Any],
    save: bool,
) -> CommandResult:
    """Start models; starts a daemon in the background if none runs, otherwise adds missing models.

    Changes of the models' settings hold until the daemon ends; `save` writes them and the models to
    corral.toml too. Raises DaemonBusy if the running daemon has another settings file or address
    than requested. A new daemon is stopped if no model is ready, unless a model waits for an RPC
    worker.
    """
    if flags := changes.get("flags"):
        changes = {**changes, "flags": absolute(flags, Path.cwd())}
    where = directories()
    client = Client(where.control_socket)
    status = running_status()
    if status is None:
        saved = _save(models, config, changes, where) if save else ()
        try:
            names = spawn_daemon(models, settings_options(config, listen), where)
        except errors.DaemonBusy:
            status = _await_status(client)
        else:
            result = _start_first(client, names, where, changes, wait=wait)
            return replace(result, notes=(*saved, *result.notes))
    check_same(status, config, listen)
    used = Path(status.config) if status.config else config
    saved = _save(models, used, changes, where) if save else ()
    result = command_adding(
        client, "start", models, status, wait=wait, changes=changes, is_kept=save
    )
    return replace(result, notes=(*saved, *result.notes, *_keep_daemon(client, where)))


def _keep_daemon(client: Client, where: Directories) -> tuple[str, ...]:
    """Have a daemon that would end with its hosts continue; return a note on it."""
    owner = read_owner(where.state_file)
    if owner is None or owner.api_key_file is None:
        return ()
    client.keep()
    begun = "corral run or an application started this daemon; it now runs until corral stop"
    return (f"{begun}, and requests need the API key in {owner.api_key_file}",)


def _save(
    words: Sequence[str], config: Path | None, changes: Mapping[str, Any], where: Directories
) -> tuple[str, ...]:
    """Write models and changes of their settings to the settings file; return its new lines."""
    # It imports tomlkit, which takes 30 ms.
    from supervisor.settings.edit import write_models

    targets = choose(words, config, where)
    path = targets.loaded.path or where.config / FILE_NAME
    return write_models(path, targets.loaded, targets.names, changes)


def check_same(status: messages.DaemonStatus, config: Path | None, listen: str | None) -> None:
    """Raise DaemonBusy unless the running daemon has the requested settings file and address."""
    wrong = []
    used = status.config
    if config and (used is None or Path(used).resolve() != config.resolve()):
        wrong.append(f"has the settings of {used or 'no file'}, not of {config.resolve()}")
    listens = status.listen or listen  # older daemons do not report it
    if listen and listen not in {listens, urlsplit(status.url).netloc}:
        wrong.append(f"listens on {listens}, not on {listen}")
    if wrong:
        raise errors.DaemonBusy(
            f"the running daemon (pid {status.pid}) {' and '.join(wrong)}",
            hint="corral stop ends it, and corral start starts one with these; or leave them out",
        )


def restart(models: Sequence[str]) -> CommandResult:
    client = Client(directories().control_socket)
    return command(client, "restart", resolve_running(models, client.status()), wait=True)


def yield_devices(duration: float | None, *, end: bool) -> CommandResult:
    found = follow(Client(directories().control_socket).yield_devices(duration, end=end))
    text = messages.yield_text(found.yielded) if found.yielded else "the devices are in use again"
    return CommandResult(found, text)


def load(models: Sequence[str]) -> CommandResult:
    client = Client(directories().control_socket)
    return command_adding(client, "load", models, client.status(), wait=True)


def command_adding(  # noqa: PLR0913 (as start)
    client: Client,
    verb: str,
    words: Sequence[str],
    status: messages.DaemonStatus,
    *,
    wait: bool,
    changes: Mapping[str, Any] = MappingProxyType({}),
    is_kept: bool = False,
) -> CommandResult:
    """Run a command on models; adds models that the daemon does not have."""
    added: Mapping[str, Mapping[str, Any]] = {}
    if unknown := unknown_words(words, status):
        added = additional_models(unknown, status, directories())
        follow(client.add_models(added))
        status = client.status()
    names = resolve_running(words, status)
    _change(client, names, changes)
    result = command(client, verb, names, wait=wait)
    notes = []
    for name, settings in () if is_kept else added.items():
        # It imports tomlkit, which takes 30 ms.
        from supervisor.settings.edit import key_text

        keep = ["corral", "config", "set", key_text(["models", name, "path"]), settings["path"]]
        notes.append(f"{name} is served until the daemon stops; to keep it: {shlex.join(keep)}")
    return replace(result, notes=(*result.notes, *notes))


def _change(client: Client, names: Sequence[str], changes: Mapping[str, Any]) -> None:
    """Change the settings of models; raises the error of a running model that did not restart."""
    if changes and (failures := follow(client.change_models(names, changes)).failures):
        raise errors.join_errors([*map(errors.from_json, failures)])


def _start_first(
    client: Client,
    names: Sequence[str],
    where: Directories,
    changes: Mapping[str, Any],
    *,
    wait: bool,
) -> CommandResult:
    try:
        _change(client, names, changes)
        return command(client, "start", names, wait=wait)
    except errors.Interrupted:
        raise
    except errors.CorralError:
        models = client.status().models
        instances = (instance for model in models for instance in _instances(model))
        if not any(found.state == "ready" or _waits_for_worker(found) for found in instances):
            stop_daemon(where)
        raise


def _await_status(client: Client) -> messages.DaemonStatus:
    """Wait for a daemon that another process is starting."""
    deadline_s = time.monotonic() + _ANSWER_TIMEOUT_S
    while True:
        try:
            return client.status()
        except errors.NotRunning:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_POLL_S)


def command(client: Client, verb: str, names: Sequence[str], *, wait: bool) -> CommandResult:
    stream = client.command(verb, names)
    if not wait:
        next(stream, None)
        status = client.status()
        return CommandResult(
            status, f"starting on {status.url}/v1", messages.keyless_warning(status)
        )
    status = follow(stream)
    models = [
        model for model in status.models if (model.name in names if names else _is_meant(model))
    ]
    notes = [line for model in models for line in reductions(model)]
    notes += [
        f"{instance.name}: {text}"
        for model in models
        for instance in _instances(model)
        for text in instance.warnings
    ]
    ready: list[str] = []
    failures: list[errors.CorralError] = []
    for model in models:
        try:
            ready += _ready(model)
        except errors.CorralError as error:
            failures.append(error)
    if failures and not ready:
        raise errors.join_errors(failures)
    failed = [describe(error, sys.stdout, "failed") for error in failures]
    text = "\n".join([*(f"ready: {name}" for name in ready), *failed, f"{status.url}/v1"])
    if verb == "start":
        text += "".join(_next_steps(models))
    return CommandResult(
        status, text, (*notes, *messages.keyless_warning(status)), 1 if failures else 0
    )


def _is_meant(model: messages.ModelStatus) -> bool:
    """Return whether a command without names is for a model: not if it loads on request.

    Daemons of earlier versions do not tell whether it does.
    """
    is_on_request = model.preload is False and model.state == "failed"
    return model.state != "unloaded" and not is_on_request


def _next_steps(models: Sequence[messages.ModelStatus]) -> Iterator[str]:
    """Yield lines on what to do, also with the first model that is ready and can chat."""
    # Daemons of earlier versions do not tell whether a model chats.
    names = (model.name for model in models if model.state == "loaded" and model.chats is not False)
    steps = {"corral ui": "opens the dashboard"}
    if name := next(names, None):
        steps[f"corral run {shlex.quote(name)}"] = "chats with it here"
    width = max(map(len, steps))
    for command, text in steps.items():
        yield f"\n  {command:{width}}  {colored(text, 'dim')}"


def _instances(model: messages.ModelStatus) -> list[messages.InstanceStatus]:
    return [instance for instance in model.instances if not instance.retiring]


def _ready(model: messages.ModelStatus) -> list[str]:
    has_error = any(instance.error for instance in model.instances)
    if model.state == "failed" and model.reason and not has_error:
        raise errors.OutOfMemory(f"{model.name} did not start: {model.reason}")
    for instance in _instances(model):
        if instance.state != "ready":
            raise _failure(instance)
    return [instance.name for instance in _instances(model)]


def _waits_for_worker(instance: messages.InstanceStatus) -> bool:
    """Return whether an instance starts as soon as an RPC worker answers."""
    error = instance.error
    is_away = error is not None and error["code"] == errors.WorkerUnreachable.code
    return is_away and instance.state != "failed"


def _failure(instance: messages.InstanceStatus) -> errors.CorralError:
    error = instance.error
    if error is None:
        return errors.StartFailed(
            f"{instance.name} is {instance.state}",
            hint="it was stopped or unloaded meanwhile" if instance.state == "stopped" else None,
            log=instance.log,
        )
    message = f"{instance.name} did not start: {error['message']}"
    if error["code"] in _SETTINGS_CODES:
        return errors.from_json({**error, "message": message})
    hint = error["hint"]
    if _waits_for_worker(instance):
        hint = f"{hint}; {instance.name} starts when it answers, corral stop ends the wait"
    return errors.StartFailed(message, hint=hint, log=error["log"])


def reload(*, dry_run: bool) -> CommandResult:
    """Reload the daemon's settings; exit code 1 if a changed model did not start."""
    report = follow(Client(directories().control_socket).reload(dry_run=dry_run))
    text = render_reload(report, dry_run=dry_run)
    return CommandResult(report, text, tuple(report.notes), 1 if report.failures else 0)


def render_reload(report: messages.ReloadReport, *, dry_run: bool) -> str:
    rows = (
        ("would add", "added", report.added),
        ("would remove", "removed", report.removed),
        ("would replace", "replaced", report.changed),
        ("would keep", "kept", report.kept),
    )
    lines = [
        f"{would if dry_run else did}: {', '.join(names)}" for would, did, names in rows if names
    ]
    for failure in report.failures:
        lines.append(f"{colored('failed', 'red')}: {failure['message']}")
        lines += [f"  {label}: {failure[label]}" for label in ("hint", "log") if failure[label]]
    return "\n".join(lines)


def warm(model: str, file: Path) -> CommandResult:
    prompt = read(file)
    client = Client(directories().control_socket)
    (name,) = resolve_running([model], client.status())
    warmed = follow(client.warm(name, dict(prompt.body)))
    lines = [
        f"{row.instance}: {row.tokens} tokens prefilled, {row.cached} already cached"
        for row in warmed
    ]
    return CommandResult(warmed, "\n".join(lines))


_HEAD = ("WORKER", "LAYERS", "PASSES", "MEAN", "PER LAYER", "MIN", "MAX", "LAST", "SUGGESTED")
_NONE = "no loaded model is split over workers"
_HINT = 'workers = ["a", "b"] under [models.NAME] splits one'


def show(word: str | None) -> CommandResult:
    found = _find_balances(Client(directories().control_socket), word)
    if not found:
        return CommandResult(found, _NONE, (_HINT,))
    notes = tuple(
        f"corral balance {balance.model} --apply moves them; the model loads again"
        for balance in found
        if balance.decision == "rebalance"
    )
    return CommandResult(found, "\n\n".join(map(render, found)), notes)


def apply(word: str | None) -> CommandResult:
    """Move the layers of a model as suggested, if a move is suggested."""
    client, found = _one_balance(word)
    if found.decision != "rebalance":
        return CommandResult(found, render(found), ("nothing was changed",))
    moved = follow(client.balance(found.model))
    return CommandResult(moved, _moved_text(moved))


def undo(word: str | None) -> CommandResult:
    client, found = _one_balance(word)
    moved = follow(client.balance(found.model, undo=True))
    return CommandResult(moved, _moved_text(moved))


def _one_balance(word: str | None) -> tuple[Client, messages.BalanceStatus]:
    if word is None:
        raise errors.SettingsInvalid(
            "name a model", hint="corral balance shows the models with workers"
        )
    client = Client(directories().control_socket)
    (found,) = _find_balances(client, word)
    return client, found


def _find_balances(client: Client, word: str | None) -> list[messages.BalanceStatus]:
    found = client.balances()
    if word is None:
        return found
    (name,) = resolve_running([word], client.status())
    balances = [balance for balance in found if balance.model == name]
    if not balances:
        from supervisor.settings.edit import key_text  # as above

        hint = _HINT.replace("models.NAME", key_text(["models", name]))
        raise errors.SettingsInvalid(
            f"{name} is not loaded, or has no workers", hint=f"corral load {name} loads it; {hint}"
        )
    return balances


def render(found: messages.BalanceStatus) -> str:
    return f"{found.instance}: {_advice(found)}\n\n{table(_HEAD, [*map(_row, found.shards)])}"


def _advice(found: messages.BalanceStatus) -> str:
    reason = found.reason
    if found.decision == "insufficient_data":
        return f"not enough data: {reason}"
    if found.decision == "balanced":
        return f"balanced: {reason}"
    gain = found.estimated_speedup or 1.0
    return f"{reason}; moving layers makes a stream about {gain:.2f} × as fast"


def _row(shard: messages.ShardStatus) -> tuple[object, ...]:
    names = ("avg_latency_us", "avg_latency_per_layer_us", "min_latency_us", "max_latency_us")
    times = [_ms(getattr(shard, name)) for name in names]
    times.append(_ms(shard.last_latency_us if shard.total_forwards else None))
    layers = f"{shard.layer_count}{'+out' if shard.has_output else ''}"
    return shard.shard_name, layers, shard.total_forwards, *times, shard.suggested_layers


def _ms(latency_us: int | None) -> str:
    return "-" if latency_us is None else f"{latency_us / 1000:.2f} ms"


def _moved_text(moved: messages.MovedLayers) -> str:
    changes = ", ".join(
        f"{name} {before} → {moved.after[name]}" for name, before in moved.before.items()
    )
    gain = moved.estimated_speedup
    effect = f"\na stream should be about {gain:.2f} × as fast" if gain else ""
    return f"{moved.model}: {changes} layers{effect}"
