"""`/slots` and `/corral/v1/slots`: the slots of all instances. Pure.

`/slots` is a list like llama-server's, for tools that read that list: the `id` of a slot is the
engine's `id_slot`, from 0 in each instance, and `/slots/N` is one slot. `/corral/v1/slots` adds
instances, totals and queues. The source is the router's own leases, not a poll of the engines,
except for the passes, which only an engine counts. Nothing here identifies a request or its client.

A sequence of llama.cpp is a slot in use: the slots of an instance that are in use are the batch
that its engine decodes together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from proxy.errors import BadRequest, NotFound
from proxy.observe.metrics import Passes
from proxy.request.models import ModelInfo
from proxy.router.lease import InstanceStats, LeaseStats, by_slot
from proxy.router.queue import QueueStats

# `held`: idle, and held for a conversation's next turn although a request waits.
State = Literal["prefill", "decode", "idle", "held"]
_PROCESSING: Final = frozenset({"prefill", "decode"})
BatchType = Literal["prefill", "decode", "mixed"]


@dataclass(frozen=True, slots=True)
class Slot:
    id: int  # the engine's `id_slot` in its instance
    model: str
    instance: str
    # Whether its request is known to have this slot. If not, the engine chose, and `id` is the
    # first that no other request has. True for idle slots.
    is_confirmed: bool = True
    state: State = "idle"
    is_ending: bool = False
    prompt_tokens: int | None = None
    # prompt tokens in the cache so far, including `cached_tokens` from before
    prompt_tokens_done: int = 0
    cached_tokens: int = 0
    decoded_tokens: int = 0
    tokens_per_second: float = 0.0
    age_s: float = 0.0
    # Its tokens in the latest pass: reported prompt tokens, or 1 for a decoding slot. Drafted
    # tokens are unknown.
    pass_tokens: int = 0
    held_for_s: float = 0.0  # At most, from now.


@dataclass(frozen=True, slots=True)
class SlotTotals:
    num_slots: int
    num_idle_slots: int
    num_active_slots: int
    num_prefill: int
    num_decode: int
    num_held: int  # Of the idle ones.
    batch_type: BatchType  # the phases of the slots in use; `decode` if none is in use
    is_full: bool
    utilization: float
    aggregate_tokens_per_second: float


def overview(
    instances: Iterable[InstanceStats],
    queues: Mapping[str, QueueStats],
    model_infos: Sequence[ModelInfo],
    now_s: float,
    passes: Mapping[str, Passes],
) -> dict[str, object]:
    """Return `/corral/v1/slots` for these models; `now_s` is on the clock of the leases."""
    shown = _ordered_instances(instances, model_infos)
    slots = all_slots(shown, now_s)
    models = (model_info.id for model_info in model_infos)
    return {
        "slots": slots,
        "instances": [
            _instance_json(instance, slots, passes.get(instance.upstream.name))
            for instance in shown
        ],
        "totals": totals_of(slots),
        "queues": {model: _queue_json(queues[model]) for model in models if model in queues},
    }


def engine_list(
    instances: Iterable[InstanceStats], model_infos: Sequence[ModelInfo], now_s: float
) -> list[dict[str, object]]:
    """Return `/slots` for these models."""
    contexts = {model_info.id: model_info.context_length for model_info in model_infos}
    found = _ordered_instances(instances, model_infos)
    speculative = {instance.upstream.name: instance.upstream.is_speculative for instance in found}
    return [
        {**_slot_json(slot, contexts[slot.model]), "speculative": speculative[slot.instance]}
        for slot in all_slots(found, now_s)
    ]


def engine_slot(listed: Sequence[Mapping[str, object]], number: str) -> Mapping[str, object]:
    """Return the slot with a number in `/slots`.

    Raises NotFound: no slot has it; BadRequest: slots of several instances have it.
    """
    found = [slot for slot in listed if str(slot["id"]) == number]
    if not found:
        raise NotFound(f"no slot has the number {number[:16]!r}; GET /slots lists them")
    if len(found) > 1:
        names = ", ".join(str(slot["instance"]) for slot in found)
        raise BadRequest(f"slots of {names} have this number; name one by ?instance=")
    return found[0]


def has_idle(listed: Sequence[Mapping[str, object]]) -> bool:
    return any(not slot["is_processing"] for slot in listed)


def all_slots(instances: Iterable[InstanceStats], now_s: float) -> list[Slot]:
    """Return the slots of instances; for withdrawn instances, only slots in use."""
    slots: list[Slot] = []
    for instance in instances:
        placed = by_slot(instance.leases, instance.upstream.slots if instance.in_service else 0)
        slots += [_slot(number, instance, lease, now_s) for number, lease in placed.items()]
    return slots


def totals_of(slots: Sequence[Slot]) -> SlotTotals:
    prefill = sum(slot.state == "prefill" for slot in slots)
    decode = sum(slot.state == "decode" for slot in slots)
    active = prefill + decode
    return SlotTotals(
        num_slots=len(slots),
        num_idle_slots=len(slots) - active,
        num_active_slots=active,
        num_prefill=prefill,
        num_decode=decode,
        num_held=sum(slot.state == "held" for slot in slots),
        batch_type=_batch_type(prefill, decode),
        is_full=active >= len(slots),
        utilization=round(active / len(slots), 4) if slots else 0.0,
        aggregate_tokens_per_second=round(sum(slot.tokens_per_second for slot in slots), 2),
    )


def _slot(number: int, instance: InstanceStats, lease: LeaseStats | None, now_s: float) -> Slot:
    model, name = instance.upstream.model, instance.upstream.name
    if lease is None:
        held_s = instance.held.get(number)
        state: State = "idle" if held_s is None else "held"
        return Slot(number, model, name, state=state, held_for_s=round(held_s or 0.0, 3))
    return Slot(
        id=number,
        model=model,
        instance=name,
        is_confirmed=lease.id_slot == number,
        state="prefill" if lease.first_token_at_s is None else "decode",
        is_ending=lease.phase == "ending",
        prompt_tokens=lease.prompt_total or None,
        prompt_tokens_done=lease.prompt_done,
        cached_tokens=lease.cached,
        decoded_tokens=lease.decoded,
        tokens_per_second=decode_rate(lease, now_s),
        age_s=round(max(0.0, now_s - lease.began_at_s), 3),
        pass_tokens=lease.prompt_step if lease.first_token_at_s is None else 1,
    )


def decode_rate(lease: LeaseStats, now_s: float) -> float:
    """Return its tokens per second until now; 0 before the second token."""
    # The first token ends the prefill.
    if lease.first_token_at_s is None or now_s <= lease.first_token_at_s or lease.decoded < 2:
        return 0.0
    return round((lease.decoded - 1) / (now_s - lease.first_token_at_s), 2)


def _batch_type(prefill: int, decode: int) -> BatchType:
    if prefill and decode:
        return "mixed"
    return "prefill" if prefill else "decode"


def _ordered_instances(
    instances: Iterable[InstanceStats], model_infos: Sequence[ModelInfo]
) -> list[InstanceStats]:
    """Return the instances of these models, in an order that restarts do not change."""
    order = {model_info.id: number for number, model_info in enumerate(model_infos)}

    def position(instance: InstanceStats) -> tuple[int, int, str]:
        name = instance.upstream.name
        return order[instance.upstream.model], len(name), name  # chat.10 comes after chat.9

    return sorted(
        (instance for instance in instances if instance.upstream.model in order), key=position
    )


def _queue_json(queue: QueueStats) -> dict[str, object]:
    return {
        "interactive": queue.interactive,
        "batch": queue.batch,
        "oldest_wait_s": round(queue.oldest_wait_s, 3),
        "expected_wait_s": round(queue.expected_wait_s, 3),
    }


def _instance_json(
    instance: InstanceStats, slots: Sequence[Slot], passes: Passes | None
) -> dict[str, object]:
    name = instance.upstream.name
    own = [slot for slot in slots if slot.instance == name]
    return {
        "instance": name,
        "model": instance.upstream.model,
        "in_service": instance.in_service,
        "conversations": instance.conversations,
        "prefill_tokens_per_second": round(instance.prefill_tps, 2),
        "decode_tokens_per_second": round(instance.decode_tps, 2),
        "weight": round(instance.weight.value, 3),
        "weight_reason": instance.weight.reason,
        "draft_acceptance": None if instance.acceptance is None else round(instance.acceptance, 3),
        "prefer_pure_decode": instance.upstream.prefer_pure_decode,
        **_members(totals_of(own)),
        "batch_slots": [slot.id for slot in own if slot.state == "decode"],
        "latest_pass": {
            "n_prompt_tokens": sum(slot.pass_tokens for slot in own if slot.state == "prefill"),
            "n_decode_tokens": sum(slot.pass_tokens for slot in own if slot.state == "decode"),
        },
        "passes": passes and passes.count,
        "prompt_tokens_per_pass": passes and round(passes.prompt_tokens / passes.count, 2),
        "decode_tokens_per_pass": passes and round(passes.decode_tokens / passes.count, 2),
    }


def _slot_json(slot: Slot, context_length: int | None) -> dict[str, object]:
    """Return llama-server's members and ours, without those that only an engine knows.

    Missing are `id_task`, `params`, and `has_new_line` and `n_remain` of `next_token`.

    Source: `server_slot::to_json` of llama.cpp's tools/server, build 10434.
    """
    members: dict[str, object] = {
        "id": slot.id,
        "n_ctx": context_length or 0,
        "is_processing": slot.state in _PROCESSING,
    }
    if slot.state in _PROCESSING:
        members |= {
            "n_prompt_tokens": slot.prompt_tokens or 0,
            "n_prompt_tokens_processed": slot.prompt_tokens_done - slot.cached_tokens,
            "n_prompt_tokens_cache": slot.cached_tokens,
            "next_token": [{"has_next_token": True, "n_decoded": slot.decoded_tokens}],
        }
    return members | _members(slot)


def _members(slot: Slot | SlotTotals) -> dict[str, object]:
    return {name: getattr(slot, name) for name in slot.__slots__}
