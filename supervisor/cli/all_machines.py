"""Implements `--all` of `status`, `requests`, `usage` and `slots`: this machine and all nodes.

The daemon asks the nodes. What a node does not answer in time is told in a note, and in `missing`
of the data. Nodes may run other versions: an answer without the members of this one is missing too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from proxy.dashboard.machines import THIS_MACHINE
from proxy.nodes.gather import NodeAnswer, Question
from proxy.observe.past import HistoryQuery, RequestStats
from supervisor.cli import requests
from supervisor.cli.status import tiers_text
from supervisor.daemon.control_client import Client
from supervisor.daemon.control_messages import CachesStatus, read
from supervisor.output import (
    CommandResult,
    colored,
    duration,
    fit,
    one_line,
    size,
    table,
    terminal_columns,
)
from supervisor.records.usage import Query
from supervisor.system.paths import directories

_HEAD: Final = ("MACHINE", "STATE", "UP", "SLOTS", "REQUESTS", "MEMORY", "VERSION", "MODELS")
_LEAST: Final = ("VERSION", "UP", "MEMORY")

Read = TypeVar("Read")


class _Gathered:
    """The answers of this machine and of all nodes; `own` returns that of this machine."""

    def __init__(
        self,
        question: Question,
        own: Callable[[Client], Mapping[str, Any]],
        query: Mapping[str, str | None] | None = None,
    ) -> None:
        client = Client(directories().control_socket)
        given = {name: value for name, value in (query or {}).items() if value is not None}
        mine = NodeAnswer(THIS_MACHINE, own(client))
        self._answers = [mine, *client.ask_nodes(question, given)]
        self.missing: list[dict[str, str | None]] = []

    def read(self, of: Callable[[Mapping[str, Any]], Read]) -> list[tuple[str, Read]]:
        """Return what `of` reads in each answer, after the name of the machine."""
        found: list[tuple[str, Read]] = []
        for answer in self._answers:
            problem = answer.problem
            if answer.answer is not None:
                try:
                    found.append((answer.node, of(answer.answer)))
                except (KeyError, TypeError, ValueError, AttributeError):
                    problem = "its answer is not that of this version of llama-corral"
            if problem is not None:
                self.missing.append({"node": answer.node, "problem": problem})
        return found

    def result(self, text: str, **data: object) -> CommandResult:
        notes = tuple(f"node {gap['node']}: {gap['problem']}" for gap in self.missing)
        return CommandResult({**data, "missing": self.missing}, text, notes)


def status() -> CommandResult:
    gathered = _Gathered("machine", lambda client: client.machine())
    found = gathered.read(lambda answer: (_row(answer), answer))
    rows = [(node, *row) for node, (row, _) in found]
    text = table(*fit(_HEAD, rows, terminal_columns(), _LEAST))
    return gathered.result(text, machines=[{"node": node, **answer} for node, (_, answer) in found])


def _row(answer: Mapping[str, Any]) -> tuple[object, ...]:
    models, memories = answer["models"], answer["memory"].values()
    total_bytes = sum(memory["total"] for memory in memories)
    used_bytes = sum(sum(memory.values()) for memory in memories) - total_bytes
    shown = [
        model["name"] if model["state"] == "loaded" else f"{model['name']} ({model['state']})"
        for model in models
    ]
    busy, slots = (sum(model[name] for model in models) for name in ("slots_busy", "slots"))
    memory = f"{size(used_bytes)} of {size(total_bytes)}"
    running = len(answer["requests"])
    up = duration(answer["up_s"])
    return answer["state"], up, f"{busy}/{slots}", running, memory, answer["version"], shown


def slots() -> CommandResult:
    now, columns = datetime.now(tz=UTC), terminal_columns()
    gathered = _Gathered("caches", lambda client: asdict(client.caches()))
    found = gathered.read(
        lambda answer: (tiers_text(read(CachesStatus, answer), now, columns), answer)
    )
    texts = (f"{colored(one_line(node), 'bold')}\n{text}" for node, (text, _) in found)
    machines = [{"node": node, **answer} for node, (_, answer) in found]
    return gathered.result("\n\n".join(texts), machines=machines)


def list_requests() -> CommandResult:
    """List the requests in flight."""
    names = [field.name for field in fields(RequestStats)]
    gathered = _Gathered("requests", lambda client: {"requests": [*map(asdict, client.requests())]})

    def stats(answer: Mapping[str, Any]) -> list[RequestStats]:
        running = [RequestStats(*(row[name] for name in names)) for row in answer["requests"]]
        _ = [*map(requests.in_flight_row, running)]
        return running

    rows = [(node, request) for node, found in gathered.read(stats) for request in found]
    cells = [{"MACHINE": node, **requests.in_flight_row(request)} for node, request in rows]
    text = requests.rows_text(cells, requests.IN_FLIGHT_LEAST, "no request is in flight")
    return gathered.result(text, requests=[{"node": node, **asdict(row)} for node, row in rows])


def list_past(query: HistoryQuery, since: str | None) -> CommandResult:
    """List ended requests of all machines, the latest last."""
    if since is not None:
        query = replace(query, since=requests.since_of(since, datetime.now(UTC)))
    asked = {
        "state": "finished",
        "limit": str(query.limit),
        "failed": str(query.is_failed).lower(),
        "model": query.model,
        "client": query.client,
        "since": None if query.since is None else str(query.since),
    }
    gathered = _Gathered(
        "requests", lambda client: {"requests": client.records("requests", query)}, asked
    )

    def ended(answer: Mapping[str, Any]) -> list[tuple[dict[str, str], dict[str, Any]]]:
        return [(requests.ended_row(row), row) for row in answer["requests"]]

    found = [
        ({"MACHINE": node, **cells}, {"node": node, **row})
        for node, rows in gathered.read(ended)
        for cells, row in rows
    ]
    found.sort(key=lambda pair: str(pair[1]["ended_at"]))
    latest = found[-query.limit :]
    text = requests.rows_text(
        [cells for cells, _ in latest], requests.ENDED_LEAST, "no such request is stored"
    )
    return gathered.result(text, requests=[row for _, row in latest])


def usage(
    query: Query, show: Callable[[Sequence[str], Sequence[Mapping[str, Any]]], str]
) -> CommandResult:
    """Show the usage of all machines by `show`, which takes the names and the sums."""
    asked = {"by": ",".join(query.by), "since": query.since, "key": query.key, "model": query.model}
    gathered = _Gathered("usage", lambda client: {"usage": client.records("usage", query)}, asked)
    names = ("node", *query.by)

    def sums(answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        found: list[Mapping[str, Any]] = [{"node": "", **row} for row in answer["usage"]]
        show(names, found)
        return found

    rows = [{**row, "node": node} for node, found in gathered.read(sums) for row in found]
    return gathered.result(show(names, rows) if rows else "no usage is recorded", usage=rows)
