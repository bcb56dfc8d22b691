"""`corral balance`: how long each worker of a split model takes, and which layers should move."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from supervisor.control.client import Client
from supervisor.control.layer_messages import BalanceStatus, MovedLayers, ShardStatus
from supervisor.control.running import last_message, resolve_running
from supervisor.errors import SettingsInvalid
from supervisor.host.paths import directories
from supervisor.output import CommandResult, table

_HEAD = ("WORKER", "LAYERS", "PASSES", "MEAN", "PER LAYER", "MIN", "MAX", "LAST", "SUGGESTED")
_NONE = "no loaded model is split over workers"
_HINT = 'workers = ["a", "b"] under [models.NAME] splits one'


def show(word: str | None) -> CommandResult:
    """Show the workers of all loaded models, or of one."""
    found = _found(Client(directories().control_socket), word)
    if not found:
        return CommandResult(found, _NONE, (_HINT,))
    return CommandResult(found, "\n\n".join(map(render, found)), tuple(_hints(found)))


def apply(word: str | None) -> CommandResult:
    """Move the layers of a model as suggested; where nothing is suggested, change nothing."""
    client, found = _one(word)
    if found["decision"] != "rebalance":
        return CommandResult(found, render(found), ("nothing was changed",))
    moved = last_message(client.balance(found["model"]))["moved"]
    return CommandResult(moved, _moved(moved))


def undo(word: str | None) -> CommandResult:
    """Give the workers of a model the layers that they had before the last move."""
    client, found = _one(word)
    moved = last_message(client.balance(found["model"], undo=True))["moved"]
    return CommandResult(moved, _moved(moved))


def _one(word: str | None) -> tuple[Client, BalanceStatus]:
    if word is None:
        raise SettingsInvalid("name a model", hint="corral balance shows the models with workers")
    client = Client(directories().control_socket)
    (found,) = _found(client, word)
    return client, found


def _found(client: Client, word: str | None) -> list[BalanceStatus]:
    found = client.balances()
    if word is None:
        return found
    (name,) = resolve_running([word], client.status())
    one = [balance for balance in found if balance["model"] == name]
    if not one:
        raise SettingsInvalid(
            f"{name} is not loaded, or has no workers",
            hint=f"corral load {name} loads it; {_HINT.replace('NAME', name)}",
        )
    return one


def render(found: BalanceStatus) -> str:
    return "\n".join(
        [
            f"{found['instance']}: {_advice(found)}",
            "",
            table(_HEAD, [_row(one) for one in found["shards"]]),
        ]
    )


def _advice(found: BalanceStatus) -> str:
    reason = found["reason"]
    if found["decision"] == "insufficient_data":
        return f"not enough data: {reason}"
    if found["decision"] == "balanced":
        return f"balanced: {reason}"
    gain = found["estimated_speedup"] or 1.0
    return f"{reason}; moving layers makes a stream about {gain:.2f} × as fast"


def _row(one: ShardStatus) -> tuple[str, ...]:
    times = ("avg_latency_us", "avg_latency_per_layer_us", "min_latency_us", "max_latency_us")
    suggested = one["suggested_layers"]
    return (
        one["shard_name"],
        str(one["layer_count"]) + ("+out" if one["has_output"] else ""),
        str(one["total_forwards"]),
        *(_ms(one[name]) for name in times),  # type: ignore[literal-required]
        _ms(one["last_latency_us"] if one["total_forwards"] else None),
        "-" if suggested is None else str(suggested),
    )


def _ms(latency_us: int | None) -> str:
    return "-" if latency_us is None else f"{latency_us / 1000:.2f} ms"


def _hints(found: Iterable[BalanceStatus]) -> Iterator[str]:
    for one in found:
        if one["decision"] == "rebalance":
            yield f"corral balance {one['model']} --apply moves them; the model loads again"


def _moved(moved: MovedLayers) -> str:
    changes = ", ".join(
        f"{name} {before} → {moved['after'][name]}" for name, before in moved["before"].items()
    )
    gain = moved["estimated_speedup"]
    effect = f"\na stream should be about {gain:.2f} × as fast" if gain else ""
    return f"{moved['model']}: {changes} layers{effect}"
