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
    fit,
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
# Columns that narrow terminals leave out, in this order.
_LEAST: Final = (
    *("RESTARTS", "PID", "UP", "MEMORY", "TOK/S"),
    *("ADDRESS", "URL", "SINGLE", "BATCHES", "MEAN SIZE", "TEMPERATURE"),
)


def status(*, everywhere: bool = False) -> CommandResult:
    """Show the daemon's status; exit code 3 if it is not running (Source: LSB).

    `everywhere`: of all nodes too.
    """
    try:
        if everywhere:
            from supervisor.cli import all_machines

            return all_machines.status()
        found = Client(directories().control_socket).status()
    except NotRunning as error:
        return CommandResult(
            {"running": False}, error.message, (error.hint or "",), error.exit_code
        )
    return CommandResult({"running": True, **vars(found)}, render(found, terminal_columns()))


def render(status: messages.DaemonStatus, columns: int | None = None) -> str:
    models, running = status.models, status.capture
    instances = [(model, instance) for model in models for instance in model.instances]
    capture = f"{messages.capture_text(running)} (corral capture --stop)" if running else ""
    lines = [
        f"llama-corral {status.version} · pid {status.pid} · up {duration(status.up_s)}"
        + (", stopping" if status.stopping else ""),
        f"{status.url}/v1",
        *(
            colored(hanging("", line, columns), "yellow")
            for line in messages.keyless_warning(status)
        ),
        "",
        _fitted(_HEAD, [_row(model, instance) for model, instance in instances], columns),
        *(_note(line, columns) for model in models for line in _waiting_lines(model)),
        *(_note(line, columns) for line in status.groups or ()),
        *(_note(line, columns) for model in models for line in _idle(model)),
        *(_note(line, columns) for model in models for line in _trial(model)),
        *([_note(capture, columns, "yellow")] if capture else []),
        *([_note(messages.yield_text(status.yielded), columns)] if status.yielded else []),
        *(_note(messages.gave_way_text(name), columns) for name in status.gave_way or ()),
        *(_note(line, columns) for model in models for line in _adapted(model)),
        *(_note(line, columns, "yellow") for model in models for line in reductions(model)),
        *(_note(line, columns) for _, instance in instances for line in _draft(instance)),
        *(_note(line, columns) for line in not_persisted_reasons(models)),
        *(line for model in models for line in _tools(model, columns)),
        *(line for _, instance in instances for line in _problems(instance, columns)),
        *_section(
            messages.DEVICE_COLUMNS, [*map(messages.device_row, status.devices or ())], columns
        ),
        *_section(_WORKERS_HEAD, [*map(_worker_row, status.workers)], columns),
        *_reasons(status.workers, columns),
        *_section(_NODES_HEAD, [*map(_node_row, status.nodes)], columns),
        *_reasons(status.nodes, columns),
        *_section(_WEIGHTS_HEAD, _weight_rows(status.weights), columns),
        *_section(_BATCHES_HEAD, [*map(_batch_row, status.batches)], columns),
    ]
    return "\n".join(lines)


def _note(text: str, columns: int | None, style: str | None = None) -> str:
    wrapped = hanging("", text, columns)
    return f"\n{colored(wrapped, style) if style else wrapped}"


def _fitted(head: Sequence[str], rows: Sequence[Sequence[object]], columns: int | None) -> str:
    return table(*fit(head, rows, columns, [title for title in _LEAST if title in head]))


def _section(
    head: Sequence[str], rows: Sequence[Sequence[object]], columns: int | None
) -> list[str]:
    """Return the lines of a further table, none without rows."""
    return ["", _fitted(head, rows, columns)] if rows else []


def _row(model: messages.ModelStatus, instance: messages.InstanceStatus) -> tuple[object, ...]:
    state, slots = messages.state_text(model, instance), f"{instance.slots_busy}/{instance.slots}"
    speed = instance.tokens_per_second
    rate = speed if speed is None else f"{speed:.1f}"
    memory, up = size(instance.memory_bytes), duration(instance.up_s)
    return instance.name, state, instance.pid, slots, rate, memory, up, instance.restarts


def _waiting_lines(model: messages.ModelStatus) -> Iterator[str]:
    if found := model.waiting:
        queued = f"{found.requests} waiting" if found.requests else "a command is waiting"
        need = f"until others are unloaded: {found.rule}" if found.rule else "for memory"
        place = f", place {found.place}" if found.place > 1 else ""
        leaving = " and ".join(found.leaving)
        no_requests = f"; no new requests for {leaving}" if leaving else ""
        time = duration(found.wait_s)
        yield f"{model.name}: {queued} {need}, {time} so far{place}{no_requests}"


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
    yield f"{model.name}: {text} ({found.origin})"


def _adapted(model: messages.ModelStatus) -> Iterator[str]:
    for change in model.adapted:
        yield f"{model.name}: {change.key} = {change.value} now: {change.reason}"


def reductions(model: messages.ModelStatus) -> Iterator[str]:
    """Yield the options that were reduced after the engine of a model ran out of memory."""
    for item in model.reduced:
        yield (f"{model.name}: {item.key} = {item.value} for want of memory: {item.reason}")


def _tools(model: messages.ModelStatus, columns: int | None) -> Iterator[str]:
    for text in messages.tools_warning(model):
        yield _note(text, columns, "red" if model.engine_tools == "network" else "yellow")


def _trial(model: messages.ModelStatus) -> Iterator[str]:
    if found := model.trial:
        share = f"{100 * found.share:g} % of new conversations"
        command = "corral engine canary" if found.is_canary else "corral trial"
        yield f"{found.instance}: {found.profile} on trial, {share} ({command})"


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
        yield f"{instance.name}: {accepted}"


def _worker_row(worker: messages.WorkerStatus) -> tuple[object, ...]:
    place = (worker.address, worker.pid, size(sum(worker.devices_bytes) or None))
    return worker.name, worker.state, *place, worker.models, worker.restarts


def _node_row(node: messages.NodeStatus) -> tuple[object, ...]:
    return node.name, node.state, f"{node.slots_busy}/{node.slots}", node.url, node.models


def _reasons(
    found: Iterable[messages.WorkerStatus | messages.NodeStatus], columns: int | None
) -> Iterator[str]:
    for member in found:
        if member.reason:
            yield _note(f"{member.name}: {member.reason}", columns, "red")


def _weight_rows(weights: list[messages.WeightStatus]) -> list[tuple[object, ...]]:
    """Return the weights of the models whose instances are not all equal."""
    unequal = {weight.model for weight in weights if weight.reason != "equal"}
    return [
        (weight.instance, f"{weight.weight:.2f}", weight.reason)
        for weight in weights
        if weight.model in unequal
    ]


def _batch_row(queue: messages.BatchQueueStatus) -> tuple[object, ...]:
    mean = f"{queue.avg_batch_size:.1f}" if queue.total_batches else None
    counts = (queue.total_queued, queue.total_batches, queue.total_single)
    return queue.model, *counts, mean, f"{queue.avg_wait_ms:.0f} ms"


def _problems(instance: messages.InstanceStatus, columns: int | None) -> Iterator[str]:
    for text in instance.warnings:
        yield _note(f"{instance.name}: {text}", columns, "yellow")
    if error := instance.error:
        yield _note(f"{instance.name}: {error['message']}", columns, "red")
        for label in ("hint", "log"):
            if value := error[label]:
                yield hanging(f"  {label}: ", value, columns)
        if again := messages.failed_text(instance):
            yield hanging("  ", again, columns)


_TIERS_HEAD: Final = ("MODEL", "TIER", "HOLDS", "PROMPTS", "TOKENS", "SAVED")
_NONE: Final = "-"
_SHORT_S: Final = 60
_SKIPPED: Final = {"cost": "it did not pay", "limit": "the limits were reached"}
_OFFLINE: Final = "the daemon is not running: only the files on disk are known"


def show_tiers(*, everywhere: bool = False) -> CommandResult:
    """Show the tiers of all models; without a daemon, only the disk.

    `everywhere`: of all nodes too, which needs the daemon.
    """
    if everywhere:
        from supervisor.cli import all_machines

        return all_machines.slots()
    where, notes = directories(), []
    try:
        found = Client(where.control_socket).caches()
    except NotRunning:
        from supervisor.daemon.cache_status import saved_status
        from supervisor.settings.load import load
        from supervisor.slot_store.store_config import store_in

        found, notes = (
            saved_status(store_in(where, load().settings.supervisor).list_saved()),
            [_OFFLINE],
        )
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
    lines = [
        line
        for status in models
        for line in (*_files(status, now), *_held(status), *_paused(status))
    ]
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


def _paused(status: messages.CacheStatus) -> Iterator[str]:
    """Yield the batch requests that gave up their slots, and the cost of that."""
    if status.handovers:
        yield (
            f"{status.model}: {_count(status.handovers, 'time')} an answer went on after its batch "
            f"request had given up its slot; that took {_seconds_text(status.handovers_s)} in all"
        )
    for paused in status.paused:
        yield (
            f"request {paused.request} of {paused.client} has been paused for "
            f"{_seconds_text(paused.paused_s)}; it goes on when a slot is free"
        )


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
