"""Implements `corral events`, `logs`, `explain`, `usage` and `record`."""

from __future__ import annotations

import asyncio
import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from proxy.observe.explanation import (
    Explanation,
    Finding,
    change_text,
    changes_by_client,
    explain,
)
from proxy.observe.past import LIMIT_MAX, HistoryQuery, StoredRequest
from supervisor.cli import requests
from supervisor.clients.journal import rule_command
from supervisor.daemon.control_client import Client, StreamEnded
from supervisor.engine.log_file import follow, tail
from supervisor.errors import NoSuchModel, NoSuchRequest, SettingsInvalid
from supervisor.events import describe
from supervisor.output import CommandResult, duration, table, to_json, write
from supervisor.records.store import RecordStore
from supervisor.records.usage import FIGURES, INTERNAL_WORK, Query, first_day
from supervisor.system.paths import Directories, directories, name_of_file


def events(*, as_json: bool) -> CommandResult:
    """Print each event until Ctrl-C or the daemon stops; as JSON, one object per line."""
    with suppress(StreamEnded):
        for message in Client(directories().control_socket).events():
            if event := message.get("event"):
                at = datetime.fromisoformat(event["at"])
                text = describe(event["name"], event["level"], at, event["fields"])
                write(to_json(event) if as_json else text)
    return CommandResult(None)


def logs(model: str | None, lines: int, *, keep_reading: bool, raw: bool) -> CommandResult:
    """Show the last lines of a model's logs (None: the daemon's), or follow them until Ctrl-C.

    `raw` writes control characters to the terminal unchanged.
    """
    files = _files(model, directories())
    if keep_reading:
        asyncio.run(_print_all(files, lines, raw=raw))
    last = [line for file in files for line in tail(file, lines)]
    data = {"files": [str(file) for file in files], "lines": last}
    return CommandResult(data, "\n".join(last), is_raw=raw)


async def _print_all(files: Sequence[Path], lines: int, *, raw: bool) -> None:
    async def print_file(file: Path) -> None:
        prefix = f"{name_of_file(file.stem)}: " if len(files) > 1 else ""
        async for line in follow(file, lines):
            write(f"{prefix}{line}", raw=raw)

    async with asyncio.TaskGroup() as readers:
        for file in files:
            readers.create_task(print_file(file))


def _files(model: str | None, where: Directories) -> list[Path]:
    if model is None:
        return [where.daemon_log]
    by_instance = where.engine_logs()
    found = [
        path
        for name, path in by_instance.items()
        if model in {name, name.partition("~")[0], name.rpartition(".")[0]}
    ]
    if found:
        return found
    known = sorted({instance.rpartition(".")[0] for instance in by_instance})
    raise NoSuchModel(
        f"{where.log} has no log of {model!r}",
        hint=f"it has logs of: {', '.join(known)}" if known else "no model has run yet",
    )


def explain_request(request_id: str | None) -> CommandResult:
    """Explain an ended request; without an id, the latest."""
    found = (
        requests.find_past_requests(request_id)
        if request_id
        else requests.read_past_requests(HistoryQuery(limit=1))
    )
    if not found:
        raise _unknown_error(request_id)
    explained = explain({**found[0], "request": found[0]["id"]})
    return CommandResult(explained.as_json(), "\n".join(_lines(explained, found[0])))


def explain_client(client: str, since: str) -> CommandResult:
    """Show a client's changes of its prompts; works without a daemon."""
    since_s = requests.since_of(since, datetime.now(UTC))
    query = HistoryQuery(limit=LIMIT_MAX, client=client, since=since_s)
    found = requests.read_past_requests(query)
    rows = changes_by_client(found)
    caches: list[Any] = [request["cache"] for request in found]
    tokens = [cache["tokens"] for cache in caches if cache]
    days = len({str(request["ended_at"])[: len("2026-11-24")] for request in found})
    data = {"client": client, "requests": len(found), "days": days, "prompt_tokens": sum(tokens)}
    if not found:
        text = f"no requests of {client} (--since {since}): name an API key or an address"
        return CommandResult({**data, "changes": rows}, text)
    in_all = f"{len(found)} requests with {sum(tokens)} prompt tokens"
    text = f"{client}: {in_all} on {days} {'day' if days == 1 else 'days'}"
    if not rows:
        return CommandResult({**data, "changes": rows}, f"{text}; it changes nothing that costs")
    cells = [
        (
            change_text(row),
            row["conversations"],
            row["turns"],
            round(row["tokens"] / days),
            " ".join(row["rules"]) or None,
        )
        for row in rows
    ]
    head = ("CHANGE", "CONVERSATIONS", "TURNS", "TOKENS A DAY", "RULES")
    rules = list(dict.fromkeys(rule for row in rows for rule in row["rules"]))
    notes = (f"to have less computed again: {rule_command(client, rules)}",) if rules else ()
    data |= {"changes": rows, "rules": rules}
    return CommandResult(data, f"{text}\n\n{table(head, cells)}", notes)


def _unknown_error(request_id: str | None) -> NoSuchRequest:
    hint = "corral requests --last 20 lists ended requests"
    if request_id is None:
        return NoSuchRequest("no request is stored", hint="each request is stored when it ends")
    if any(request["id"] == request_id for request in requests.read_running_requests()):
        return NoSuchRequest(
            f"{request_id} is still in flight",
            hint=f"corral requests show {request_id} shows its progress",
        )
    return NoSuchRequest(f"no request has the id {request_id}", hint=hint)


def _lines(explained: Explanation, found: StoredRequest) -> Iterator[str]:
    for finding in explained.findings:
        yield _sentence(finding)
        if finding.advice:
            yield f"  {finding.advice}"
    if not explained.findings:
        yield "it ended before the engine reported figures, and no wait stands out"
    if explained.rules:
        yield f"prompt rules of its client changed it: {', '.join(explained.rules)}"
    yield ""
    yield requests.request_lines(found)


def _sentence(finding: Finding) -> str:
    is_costly = finding.cost_ms >= 1 and finding.advice
    cost = f" (about {finding.cost_ms / 1000:.2f} s)" if is_costly else ""
    return f"{finding.sentence[:1].upper()}{finding.sentence[1:]}{cost}"


_HEAD = ("REQUESTS", "PROMPT", "CACHED", "SAVED", "GENERATED", "SLOT TIME", "CPU TIME")


def usage(
    query: Query, *, as_csv: bool, internal: bool = False, everywhere: bool = False
) -> CommandResult:
    """Show tokens and seconds; `query.since` is a day, a month, or a number of days (7d).

    Args:
        query: The rows.
        as_csv: Whether to print comma-separated values.
        internal: Whether to show each kind of internal work, or all kinds as one row.
        everywhere: Whether to ask all nodes too.
    """
    today = datetime.now().astimezone().date()
    try:
        query = replace(query, since=first_day(query.since, today))
    except ValueError as error:
        raise SettingsInvalid(
            f"--since: {error}", hint="write 2026-11-22, 2026-11 or 7d"
        ) from error
    is_folded = not (internal or query.key)
    show = _csv if as_csv else partial(_text, is_folded=is_folded)
    if everywhere:
        from supervisor.cli import all_machines

        return all_machines.usage(query, show)
    found = requests.ask_records("usage", query, [])
    is_empty = not (found or as_csv)
    return CommandResult(found, "no usage is recorded" if is_empty else show(query.by, found))


def _text(names: Sequence[str], found: Sequence[Mapping[str, Any]], *, is_folded: bool) -> str:
    shown = _fold(found) if is_folded and "key" in names else found
    rows = [(*(group[name] for name in names), *_figures(group)) for group in shown]
    if len(found) > 1 and "node" not in names:  # this machine counts requests that it forwards, too
        total = {name: sum(group[name] for group in found) for name in FIGURES}
        rows.append(("total", *[""] * (len(names) - 1), *_figures(total)))
    return table((*("MACHINE" if name == "node" else name.upper() for name in names), *_HEAD), rows)


def _fold(found: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Sum the internal work of each machine, behind the rows of clients."""
    sums: dict[str, dict[str, Any]] = {}
    for row in found:
        if row["key"] in INTERNAL_WORK:
            node = row.get("node", "")
            whole = sums.setdefault(node, {"node": node, "key": "(internal)", "model": ""})
            whole.update({name: whole.get(name, 0) + row[name] for name in FIGURES})
    return [*(row for row in found if row["key"] not in INTERNAL_WORK), *sums.values()]


def _figures(group: Mapping[str, Any]) -> tuple[object, ...]:
    computed, cached = group["prompt_tokens"], group["cached_tokens"]
    share = f"{cached / (computed + cached):.0%}" if computed + cached else None
    times = duration(group["slot_seconds"]), duration(group["cpu_seconds"])
    return group["requests"], computed, cached, share, group["generated_tokens"], *times


def _csv(names: Sequence[str], data: Sequence[Mapping[str, object]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [*names, *FIGURES], lineterminator="\n")
    writer.writeheader()
    writer.writerows(data)
    return text.getvalue().rstrip("\n")


def show_recorded() -> CommandResult:
    """Show the number of recorded requests of each model; works without a daemon."""
    path = str(RecordStore(directories().data).path)
    counts = requests.ask_records("size_counts", None, {})
    rows = list(counts.items())
    text = f"{table(('MODEL', 'REQUESTS'), rows)}\n\n{path}" if rows else "no recorded requests"
    return CommandResult({"path": path, "models": counts}, text)


def forget_recorded(model: str | None, *, everything: bool) -> CommandResult:
    """Delete the records of a model, or of all models; works without a daemon."""
    if (model is None) is not everything:
        raise SettingsInvalid("name a model, or give --all", hint="corral record show lists them")
    counts = requests.ask_records("forget_sizes", model, {})
    return CommandResult(counts, f"deleted: figures of {sum(counts.values())} requests")
