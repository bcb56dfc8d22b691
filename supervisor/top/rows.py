"""The texts of the tables. Pure; names come from outside: no text has control characters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from supervisor.control.messages import DaemonStatus, InstanceStatus, ModelStatus, NodeStatus
from supervisor.control.request_status import RequestStatus, phase_text
from supervisor.control.state_text import state_text
from supervisor.output import duration, one_line, size

_NONE: Final = "-"


@dataclass(frozen=True, slots=True)
class Column:
    """A column; `from_width`: in narrower terminals it is left out."""

    title: str
    from_width: int = 0
    is_figure: bool = False


INSTANCE_COLUMNS: Final = (
    Column("MODEL", 70),
    Column("QUEUED", 50, is_figure=True),
    Column("INSTANCE"),
    Column("STATE"),
    Column("SLOTS", is_figure=True),
    Column("TOKENS/S", 40, is_figure=True),
    Column("MEMORY", 60, is_figure=True),
    Column("UP", 80, is_figure=True),
    Column("RESTARTS", 80, is_figure=True),
    Column("PROBLEM", 100),
)
REQUEST_COLUMNS: Final = (
    Column("ID"),
    Column("AGE", is_figure=True),
    Column("MODEL", 40),
    Column("INSTANCE", 90),
    Column("SLOT", 90, is_figure=True),
    Column("CLIENT", 80),
    Column("PHASE"),
    Column("TOKENS", 60, is_figure=True),
    Column("TOKENS/S", 50, is_figure=True),
)


def summary(status: DaemonStatus, requests: Sequence[RequestStatus]) -> tuple[str, str]:
    """The daemon in one line, its load in another."""
    instances = [one for model in status["models"] for one in model["instances"]]
    ready = sum(one["state"] == "ready" for one in instances)
    queued = sum(one["phase"] == "queued" for one in requests)
    busy, slots = (sum(one[name] for one in instances) for name in ("slots_busy", "slots"))
    rate = sum(_rates(requests).values())
    daemon = (
        f"llama-corral {status['version']} · pid {status['pid']} · up {duration(status['up_s'])}"
        f" · {status['url']}/v1{' · stopping' if status['stopping'] else ''}"
    )
    load = (
        f"{ready} of {len(instances)} instances ready · {busy} of {slots} slots busy · "
        f"{len(requests)} requests, {queued} queued · {rate:.1f} tokens/s"
    )
    return one_line(daemon), one_line(load)


def instance_rows(status: DaemonStatus, requests: Sequence[RequestStatus]) -> list[tuple[str, ...]]:
    """Rows of instances, the first of each model with its queue; then those of nodes."""
    queued = Counter(one["model"] for one in requests if one["phase"] == "queued")
    rates = _rates(requests)
    rows = [row for one in status["models"] for row in _of_model(one, queued[one["name"]], rates)]
    return [_shown(row) for row in (*rows, *map(_of_node, status["nodes"]))]


def _rates(requests: Iterable[RequestStatus]) -> dict[str | None, float]:
    """Tokens per second that instances generate now, by name."""
    rates: dict[str | None, float] = {}
    for one in requests:
        if one["phase"] == "decode":
            rates[one["instance"]] = rates.get(one["instance"], 0.0) + one["tokens_per_second"]
    return rates


def _of_model(
    model: ModelStatus, queued: int, rates: Mapping[str | None, float]
) -> Iterator[tuple[str, ...]]:
    first = (model["name"], str(queued))
    for instance in model["instances"]:
        yield *first, *_of_instance(model, instance, rates.get(instance["name"]))
        first = ("", "")
    if not model["instances"]:
        yield *first, _NONE, model["state"], *[_NONE] * 5, model["reason"] or ""


def _of_instance(
    model: ModelStatus, instance: InstanceStatus, rate: float | None
) -> tuple[str, ...]:
    error = instance["error"]
    return (
        instance["name"],
        state_text(model, instance),
        f"{instance['slots_busy']}/{instance['slots']}",
        _rate(rate),
        size(instance["memory_bytes"]),
        duration(instance["up_s"]),
        str(instance["restarts"]),
        error["message"] if error else next(iter(instance["warnings"]), ""),
    )


def _of_node(node: NodeStatus) -> tuple[str, ...]:
    slots = f"{node['slots_busy']}/{node['slots']}"
    rest = [_NONE] * 4
    return "node", _NONE, node["name"], node["state"], slots, *rest, node["reason"] or ""


def request_row(one: RequestStatus) -> tuple[str, ...]:
    return _shown(
        (
            one["id"],
            duration(one["age_s"]),
            one["model"] or _NONE,
            one["instance"] or _NONE,
            _NONE if one["slot"] is None else str(one["slot"]),
            one["client"] + (" (batch)" if one["priority"] == "batch" else ""),
            phase_text(one),
            str(one["decoded_tokens"] or _NONE),
            _rate(one["tokens_per_second"]),
        )
    )


def _rate(tokens_per_second: float | None) -> str:
    return f"{tokens_per_second:.1f}" if tokens_per_second else _NONE


def _shown(cells: Iterable[str]) -> tuple[str, ...]:
    return tuple(map(one_line, cells))
