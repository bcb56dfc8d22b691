"""The pages that show the slots of all instances, to tools and to people. Pure.

`/slots` is a list, as llama-server's own is, and tools that read that one read this one too.
`/corral/v1/slots` says what a list of slots cannot: what each instance does, the totals, and who
waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from proxy.metrics.slots_endpoint import Slot, SlotTotals, all_slots, totals_of
from proxy.models import ModelInfo
from proxy.router.instances import InstanceStats
from proxy.router.model_queue import QueueStats


def overview(
    instances: Iterable[InstanceStats],
    lines: Mapping[str, QueueStats],
    model_infos: Sequence[ModelInfo],
    now_s: float,
) -> dict[str, object]:
    """Return the page `/corral/v1/slots`: slots, instances, totals and lines.

    Args:
        instances: The instances.
        lines: Who waits, by model.
        model_infos: The models that the page is about.
        now_s: The moment, on the clock of the leases.
    """
    shown = _shown(instances, model_infos)
    slots = all_slots(shown, now_s)
    return {
        "slots": slots,
        "instances": [_instance(instance, slots) for instance in shown],
        "totals": totals_of(slots),
        "queues": {
            model_info.id: _line(lines[model_info.id])
            for model_info in model_infos
            if model_info.id in lines
        },
    }


def engine_list(
    instances: Iterable[InstanceStats], model_infos: Sequence[ModelInfo], now_s: float
) -> list[dict[str, object]]:
    """Return the page `/slots`: the slots of these models, as llama-server lists its own."""
    contexts = {model_info.id: model_info.context_length for model_info in model_infos}
    slots = all_slots(_shown(instances, model_infos), now_s)
    return [_as_engine(slot, contexts[slot.model]) for slot in slots]


def has_idle(listed: Sequence[Mapping[str, object]]) -> bool:
    """Return whether a slot of the page `/slots` is free."""
    return any(not slot["is_processing"] for slot in listed)


def _shown(
    instances: Iterable[InstanceStats], model_infos: Sequence[ModelInfo]
) -> list[InstanceStats]:
    """Return the instances of these models, in an order that restarts do not change."""
    order = {model_info.id: number for number, model_info in enumerate(model_infos)}
    shown = (instance for instance in instances if instance.upstream.model in order)

    def place(instance: InstanceStats) -> tuple[int, int, str]:
        name = instance.upstream.name
        return order[instance.upstream.model], len(name), name  # chat.10 comes after chat.9

    return sorted(shown, key=place)


def _line(line: QueueStats) -> dict[str, object]:
    return {
        "interactive": line.interactive,
        "batch": line.batch,
        "oldest_wait_s": round(line.oldest_wait_s, 3),
        "expected_wait_s": round(line.expected_wait_s, 3),
    }


def _instance(instance: InstanceStats, slots: Sequence[Slot]) -> dict[str, object]:
    name = instance.upstream.name
    return {
        "instance": name,
        "model": instance.upstream.model,
        "in_service": instance.in_service,
        "conversations": instance.conversations,
        "prefill_tokens_per_second": round(instance.prefill_tps, 2),
        "decode_tokens_per_second": round(instance.decode_tps, 2),
        "draft_acceptance": None if instance.acceptance is None else round(instance.acceptance, 3),
        **_as_page(totals_of([slot for slot in slots if slot.instance == name])),
    }


def _as_engine(slot: Slot, context_length: int | None) -> dict[str, object]:
    """Return a slot as tools know it from llama-server's own `/slots`, and ours beside that.

    Source: `server_slot::to_json` of llama.cpp's tools/server, build 10434.
    """
    page: dict[str, object] = {
        "id": slot.id,
        "n_ctx": context_length or 0,
        "is_processing": slot.state != "idle",
    }
    if slot.state != "idle":
        page |= {
            "n_prompt_tokens": slot.prompt_tokens or 0,
            "n_prompt_tokens_processed": slot.prompt_tokens_done - slot.cached_tokens,
            "n_prompt_tokens_cache": slot.cached_tokens,
            "next_token": [{"has_next_token": True, "n_decoded": slot.decoded_tokens}],
        }
    return page | _as_page(slot)


def _as_page(part: Slot | SlotTotals) -> dict[str, object]:
    """Return its attributes as members."""
    return {name: getattr(part, name) for name in part.__slots__}
