"""Every slot of every instance, and what they do together. Pure.

The source is our own account of who holds what, not a poll of the engines. We never pin a slot, so
which of its slots an engine uses for a request is its own affair: `index` only counts them, the
oldest request first. Nothing here tells what anybody asks, or who asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from proxy.router.instances import InstanceStats
from proxy.router.lease import LeaseStats

State = Literal["prefill", "decode", "idle"]


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot at one moment.

    Attributes:
        id: Its number among all that are listed, from 0.
        model: The id of the model.
        instance: The name of the instance.
        index: Its number among those of the instance, from 0.
        state: What the engine does in it.
        is_ending: Whether its request is over for the client, and the engine has yet to stop.
        prompt_tokens: Tokens of the prompt; a guess until the engine says, None without one.
        prompt_tokens_done: Tokens of the prompt that are in the cache by now.
        cached_tokens: Those of them that were there before.
        decoded_tokens: Tokens generated.
        tokens_per_second: Tokens generated each second so far; 0 unless it decodes.
        age_s: Seconds since the instance got the request; 0 where it is idle.
    """

    id: int
    model: str
    instance: str
    index: int
    state: State = "idle"
    is_ending: bool = False
    prompt_tokens: int | None = None
    prompt_tokens_done: int = 0
    cached_tokens: int = 0
    decoded_tokens: int = 0
    tokens_per_second: float = 0.0
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SlotTotals:
    """What the slots of an instance, or of all, do together.

    Attributes:
        slots: Slots there are.
        idle: Those that nothing uses.
        active: Those in use.
        generating: Those that decode.
        prefill: Sequences whose prompt is being read.
        decode: Sequences to which tokens are added.
        batch: What the engine's batches are made of; None where all is idle.
        utilisation: Active slots as a share of all, 0 to 1.
        tokens_per_second: Tokens generated each second, over all slots.
    """

    slots: int
    idle: int
    active: int
    generating: int
    prefill: int
    decode: int
    batch: Literal["prefill", "decode", "mixed"] | None
    utilisation: float
    tokens_per_second: float


def all_slots(instances: Iterable[InstanceStats], now_s: float) -> list[Slot]:
    """Return the slots of some instances; of one that is withdrawn, those still in use.

    Args:
        instances: The instances.
        now_s: The moment, on the clock of the leases.
    """
    slots: list[Slot] = []
    for instance_stats in instances:
        idle = (
            instance_stats.upstream.slots - len(instance_stats.leases)
            if instance_stats.in_service
            else 0
        )
        for index, lease in enumerate((*instance_stats.leases, *[None] * idle)):
            slots.append(_slot(len(slots), instance_stats, index, lease, now_s))
    return slots


def totals_of(slots: Sequence[Slot]) -> SlotTotals:
    """Return what some slots do together."""
    prefill = sum(slot.state == "prefill" for slot in slots)
    decode = sum(slot.state == "decode" for slot in slots)
    active = prefill + decode
    return SlotTotals(
        slots=len(slots),
        idle=len(slots) - active,
        active=active,
        generating=decode,
        prefill=prefill,
        decode=decode,
        batch=_batch(prefill, decode),
        utilisation=round(active / len(slots), 4) if slots else 0.0,
        tokens_per_second=round(sum(slot.tokens_per_second for slot in slots), 2),
    )


def _slot(
    number: int, instance_stats: InstanceStats, index: int, lease: LeaseStats | None, now_s: float
) -> Slot:
    model, instance = instance_stats.upstream.model, instance_stats.upstream.name
    if lease is None:
        return Slot(number, model, instance, index)
    return Slot(
        id=number,
        model=model,
        instance=instance,
        index=index,
        state="prefill" if lease.first_token_at_s is None else "decode",
        is_ending=lease.phase == "ending",
        prompt_tokens=lease.prompt_total or None,
        prompt_tokens_done=lease.prompt_done,
        cached_tokens=lease.cached,
        decoded_tokens=lease.decoded,
        tokens_per_second=_rate(lease, now_s),
        age_s=round(max(0.0, now_s - lease.began_at_s), 3),
    )


def _rate(lease: LeaseStats, now_s: float) -> float:
    """Return the tokens after the first by the time since it."""
    if lease.first_token_at_s is None or now_s <= lease.first_token_at_s or lease.decoded < 2:
        return 0.0
    return round((lease.decoded - 1) / (now_s - lease.first_token_at_s), 2)


def _batch(prefill: int, decode: int) -> Literal["prefill", "decode", "mixed"] | None:
    if prefill and decode:
        return "mixed"
    if prefill:
        return "prefill"
    return "decode" if decode else None
