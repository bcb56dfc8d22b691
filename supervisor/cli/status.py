"""Implements `corral status`, `slots` and `ui`: the state of a running daemon. Starts fast."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final

from supervisor.daemon import control_messages as messages
from supervisor.daemon.control_client import Client
from supervisor.errors import NotRunning
from supervisor.output import (
    CommandResult,
    colored,
    duration,
    hanging,
    is_fitting,
    one_line,
    size,
    table,
    terminal_columns,
)
from supervisor.system.paths import directories

_HEAD = ("INSTANCE", "STATE", "PID", "SLOTS", "TOK/S", "MEMORY", "UP", "RESTARTS")
_NODES_HEAD = ("NODE", "STATE", "SLOTS", "URL", "MODELS")
_WEIGHTS_HEAD = ("REQUESTS TO", "WEIGHT", "REASON")
_WORKERS_HEAD = ("WORKER", "STATE", "ADDRESS", "PID", "MEMORY", "MODELS", "RESTARTS")
_BATCHES_HEAD = ("BATCHES OF", "REQUESTS", "BATCHES", "SINGLE", "MEAN SIZE", "MEAN WAIT")
_STYLES = {"ready": "green", "failed": "red", "backoff": "yellow", "unhealthy": "yellow"}


def status() -> CommandResult:
    """Show the daemon's status; exit code 3 if it is not running (Source: LSB)."""
    try:
        found = Client(directories().control_socket).status()
    except NotRunning as error:
        return CommandResult(
            {"running": False}, error.message, (error.hint or "",), error.exit_code
        )
    return CommandResult({"running": True, **vars(found)}, render(found))


def render(status: messages.DaemonStatus) -> str:
    models, running = status.models, status.capture
    instances = [(model, instance) for model in models for instance in model.instances]
    capture = colored(messages.capture_text(running), "yellow") if running else ""
    lines = [
        f"llama-corral {status.version} · pid {status.pid} · up {duration(status.up_s)}"
        + (", stopping" if status.stopping else ""),
        f"{status.url}/v1",
        *(colored(line, "yellow") for line in messages.keyless_warning(status)),
        "",
        table(_HEAD, [_row(model, instance) for model, instance in instances]),
        *(line for model in models for line in _waiting_lines(model)),
        *(line for model in models for line in _idle(model)),
        *(line for model in models for line in _trial(model)),
        *([f"\n{capture} (corral capture --stop)"] if capture else []),
        *(
            f"\n{model.name}: {change.key} = {change.value} now: {change.reason}"
            for model in models
            for change in model.adapted
        ),
        *(f"\n{colored(line, 'yellow')}" for model in models for line in reductions(model)),
        *(line for _, instance in instances for line in _draft(instance)),
        *(f"\n{line}" for line in not_persisted_reasons(models)),
        *(line for model in models for line in _tools(model)),
        *(line for _, instance in instances for line in _problems(instance)),
        *_workers(status.workers),
        *_nodes(status.nodes),
        *_weights(status.weights),
        *_section(_BATCHES_HEAD, [*map(_batch_row, status.batches)]),
    ]
    return "\n".join(lines)


def _row(model: messages.ModelStatus, instance: messages.InstanceStatus) -> tuple[object, ...]:
    state, slots = messages.state_text(model, instance), f"{instance.slots_busy}/{instance.slots}"
    speed = instance.tokens_per_second
    rate = speed if speed is None else f"{speed:.1f}"
    memory, up = size(instance.memory_bytes), duration(instance.up_s)
    return instance.name, state, instance.pid, slots, rate, memory, up, instance.restarts


def _waiting_lines(model: messages.ModelStatus) -> Iterator[str]:
    if found := model.waiting:
        queued = f"{found.requests} waiting" if found.requests else "a command is waiting"
        place = f", place {found.place}" if found.place > 1 else ""
        leaving = " and ".join(found.leaving)
        no_requests = f"; no new requests for {leaving}" if leaving else ""
        time = duration(found.wait_s)
        yield f"\n{model.name}: {queued} for memory, {time} so far{place}{no_requests}"


def _idle(model: messages.ModelStatus) -> Iterator[str]:
    """Yield when a loaded model will be unloaded, or that a request keeps it loaded."""
    found = model.idle
    if found is None or (found.limit_s is None and found.origin == "ttl_s"):
        return
    if found.limit_s is None:
        text = "stays loaded"
    elif found.unload_in_s is None:
        text = f"unloaded {duration(found.limit_s)} after its last request"
    else:
        text = f"unloaded in {duration(found.unload_in_s)} without a request"
    yield f"\n{model.name}: {text} ({found.origin})"


def reductions(model: messages.ModelStatus) -> Iterator[str]:
    """Yield the options that were reduced after the engine of a model ran out of memory."""
    for item in model.reduced:
        yield (f"{model.name}: {item.key} = {item.value} for want of memory: {item.reason}")


def _tools(model: messages.ModelStatus) -> Iterator[str]:
    for text in messages.tools_warning(model):
        yield f"\n{colored(text, 'red' if model.engine_tools == 'network' else 'yellow')}"


def _trial(model: messages.ModelStatus) -> Iterator[str]:
    if found := model.trial:
        share = f"{100 * found.share:g} % of new conversations"
        command = "corral engine canary" if found.is_canary else "corral trial"
        yield f"\n{found.instance}: {found.profile} on trial, {share} ({command})"


def not_persisted_reasons(models: Iterable[messages.ModelStatus]) -> list[str]:
    return [
        f"{model.name} saves no conversations across restarts: {model.not_persisted_reason}"
        for model in models
        if model.not_persisted_reason
    ]


def _draft(instance: messages.InstanceStatus) -> Iterator[str]:
    draft = instance.draft
    if draft and draft.acceptance is not None:
        accepted = f"accepts {draft.acceptance:.0%} of {draft.drafted} drafted tokens"
        yield f"\n{instance.name}: {accepted}"


def _section(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return the lines of a further table, none without rows."""
    return ["", table(head, rows)] if rows else []


def _workers(workers: list[messages.WorkerStatus]) -> list[str]:
    return [*_section(_WORKERS_HEAD, [*map(_worker_row, workers)]), *_reasons(workers)]


def _worker_row(worker: messages.WorkerStatus) -> tuple[object, ...]:
    place = (worker.address, worker.pid, size(sum(worker.devices_bytes) or None))
    return worker.name, worker.state, *place, worker.models, worker.restarts


def _nodes(nodes: list[messages.NodeStatus]) -> list[str]:
    rows = [
        (node.name, node.state, f"{node.slots_busy}/{node.slots}", node.url, node.models)
        for node in nodes
    ]
    return [*_section(_NODES_HEAD, rows), *_reasons(nodes)]


def _reasons(found: Iterable[messages.WorkerStatus | messages.NodeStatus]) -> Iterator[str]:
    for member in found:
        if member.reason:
            yield f"\n{member.name}: {colored(member.reason, 'red')}"


def _weights(weights: list[messages.WeightStatus]) -> list[str]:
    """Return the table of weights, of the models whose instances are not all equal."""
    unequal = {weight.model for weight in weights if weight.reason != "equal"}
    rows = [
        (weight.instance, f"{weight.weight:.2f}", weight.reason)
        for weight in weights
        if weight.model in unequal
    ]
    return _section(_WEIGHTS_HEAD, rows)


def _batch_row(queue: messages.BatchQueueStatus) -> tuple[object, ...]:
    mean = f"{queue.avg_batch_size:.1f}" if queue.total_batches else None
    counts = (queue.total_queued, queue.total_batches, queue.total_single)
    return queue.model, *counts, mean, f"{queue.avg_wait_ms:.0f} ms"


def _problems(instance: messages.InstanceStatus) -> Iterator[str]:
    for text in instance.warnings:
        yield f"\n{instance.name}: {colored(text, 'yellow')}"
    if error := instance.error:
        yield f"\n{instance.name}: {colored(error['message'], 'red')}"
        yield from (f"  {label}: {error[label]}" for label in ("hint", "log") if error[label])
        if again := messages.failed_text(instance):
            yield f"  {again}"


_TIERS_HEAD: Final = ("MODEL", "TIER", "HOLDS", "PROMPTS", "TOKENS", "SAVED")
_NONE: Final = "-"
_SHORT_S: Final = 60
_SKIPPED: Final = {"cost": "it did not pay", "limit": "the limits were reached"}
_OFFLINE: Final = "the daemon is not running: only the files on disk are known"


def show_tiers() -> CommandResult:
    """Show the tiers of all models; without a daemon, only the disk."""
    where, notes = directories(), []
    try:
        found = Client(where.control_socket).caches()
    except NotRunning:
        from supervisor.daemon.cache_status import saved_status
        from supervisor.slot_store.store_config import store_in

        found, notes = saved_status(store_in(where).list_saved()), [_OFFLINE]
    if found.disk.paused:
        notes.append("the disk failed: saving is paused for a while (corral logs says why)")
    notes += [
        f"{status.model} saves nothing on disk: {status.not_saved_reason}"
        for status in found.models
        if status.not_saved_reason
    ]
    text = tiers_text(found, datetime.now(tz=UTC), terminal_columns())
    return CommandResult(found, text, tuple(notes))


def tiers_text(found: messages.CachesStatus, now: datetime, columns: int | None = None) -> str:
    models = found.models
    if not models:
        return "no model, and nothing on disk"
    rows = [row for status in models for row in _rows(status)]
    lines = [line for status in models for line in (*_files(status, now), *_held(status))]
    lines += _disk(found.disk)
    if is_fitting(_TIERS_HEAD, rows, columns):
        tables = [table(_TIERS_HEAD, rows)]
    else:
        tables = [text for status in models for text in _narrow_tiers(status, columns)]
    return "\n".join([*tables, *(hanging("", line, columns) for line in lines)])


def _narrow_tiers(status: messages.CacheStatus, columns: int | None) -> Iterator[str]:
    """Yield the tiers of a model below its name; what they hold stands below their figures."""
    rows = [*_rows(status)]
    yield colored(one_line(status.model), "bold")
    yield table(("TIER", *_TIERS_HEAD[3:]), [(row[1], *row[3:]) for row in rows])
    for row in rows:
        if row[2] not in {"", _NONE}:
            yield hanging(f"{row[1]}: ", row[2], columns)
    yield ""


def _rows(status: messages.CacheStatus) -> Iterator[tuple[str, ...]]:
    model = status.model
    for tier in status.tiers:
        name = tier.tier.replace("_", " ")
        figures = _figures(tier.prompts, tier.found_tokens, status)
        saved = _seconds_text(tier.saved_s) if tier.found_tokens else _NONE
        yield model, name, _holds(tier, status), *figures, saved
        model = ""
    none = status.prompts - sum(tier.prompts for tier in status.tiers)
    yield "", "computed", "", *_figures(none, status.computed_tokens, status), _NONE


def _figures(prompts: int, tokens: int, status: messages.CacheStatus) -> tuple[str, str]:
    if not status.prompt_tokens:
        return _NONE, _NONE
    return str(prompts), f"{tokens} ({tokens / status.prompt_tokens:.0%})"


def _seconds_text(seconds: float) -> str:
    return f"{seconds:.1f}s" if seconds < _SHORT_S else duration(seconds)


def _holds(tier: messages.TierStatus, status: messages.CacheStatus) -> str:
    if tier.tier == "slot" and not status.slots:
        return _NONE  # no instance runs
    if tier.conversations is None:
        limit = tier.limit_bytes
        return "no limit" if limit is None else f"up to {size(limit)}" if limit else _NONE
    if tier.tier == "disk" and not tier.conversations:
        return _NONE
    parts = [_count(tier.conversations, "conversation"), f"{tier.tokens} tokens"]
    if tier.tier == "slot":
        parts.append(_count(status.slots, "slot"))
    if tier.size_bytes is not None:
        limit = tier.limit_bytes
        parts.append(size(tier.size_bytes) + (f" of {size(limit)}" if limit else ""))
    return ", ".join(parts)


def _files(status: messages.CacheStatus, now: datetime) -> Iterator[str]:
    """Yield figures of slot files since the daemon's start, and the age of the oldest file."""
    saves, restores = status.saves, status.restores
    parts = [*_operation(saves, "saved"), *_operation(restores, "restored")]
    if failures := saves.failures + restores.failures:
        parts.append(f"{failures} failed")
    parts += [f"{count} saves skipped ({_SKIPPED[why]})" for why, count in status.skipped.items()]
    if status.oldest_at:
        age_s = (now - datetime.fromisoformat(status.oldest_at)).total_seconds()
        parts.append(f"the oldest is {duration(max(0.0, age_s))} old")
    if parts:
        yield f"{status.model} on disk: {', '.join(parts)}"
    ahead = status.next_turns
    if ahead.computed or ahead.aborted:
        aborted = f", {ahead.aborted} aborted" if ahead.aborted else ""
        yield (
            f"{status.model} computed ahead: {_count(ahead.computed, 'next turn')}{aborted}, "
            f"{ahead.computed_tokens} tokens in {_seconds_text(ahead.duration_s)}; then found "
            f"{ahead.used_tokens}, not found {ahead.missed_tokens}"
        )


def _held(status: messages.CacheStatus) -> Iterator[str]:
    """Yield the slots that are held for agents now, and how often and how long any were."""
    if status.holds:
        ended = ", ".join(f"{count} {result}" for result, count in status.holds.items())
        yield f"{status.model} held for agents: {ended}, {_seconds_text(status.held_s)} in all"
    for slot, left_s in status.held.items():
        yield f"{slot} is held for its next turn, for {_seconds_text(left_s)} at most"


def _disk(disk: messages.SlotDiskStatus) -> Iterator[str]:
    limit, written, write_limit = (disk.limit_bytes, disk.written_bytes, disk.write_limit_bytes)
    if limit is not None and written is not None and write_limit is not None:
        room = f"{size(disk.size_bytes)} of {size(limit)}{' (auto)' if disk.limit_is_auto else ''}"
        yield f"disk: {room}; written in the last hour: {size(written)} of {size(write_limit)}"


def _operation(done: messages.SlotFileStatus, verb: str) -> Iterator[str]:
    if done.count:
        mean_ms = 1000 * done.duration_s / done.count
        yield f"{done.count} {verb} ({size(done.size_bytes)}, {mean_ms:.0f} ms each)"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def ui(*, no_browser: bool, as_json: bool) -> CommandResult:
    """Open the dashboard, signed in, or show its link."""
    import webbrowser

    opens = not (no_browser or as_json)
    link, is_opened = Client(directories().control_socket).dashboard_link(), False
    with suppress(webbrowser.Error):
        is_opened = opens and shows_windows(os.environ, sys.platform) and webbrowser.open(link)
    data = {"url": link, "is_opened": is_opened}
    if is_opened:
        return CommandResult(data, f"opened {link.partition('#')[0]} in the browser")
    note = "the link signs in one browser, within a minute"
    missing = ("no browser was found; open the link in one",) if opens else ()
    return CommandResult(data, link, (*missing, note))


def shows_windows(environ: Mapping[str, str], platform: str) -> bool:
    """Return whether a browser can open a window; otherwise Python starts one in the terminal."""
    if platform in {"darwin", "win32"}:
        return True
    return any(environ.get(name) for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"))
