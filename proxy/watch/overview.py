"""The pages that show the slots of all instances, to tools and to people. Pure.

`/slots` is a list, as llama-server's own is, and tools that read that one read this one too.
`/corral/v1/slots` says what a list of slots cannot: what each instance does, the totals, and who
waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from proxy.line.pool import LineFacts
from proxy.line.seats import SeatFacts
from proxy.loader import ModelCard
from proxy.watch.slots import Load, Slot, all_slots, load_of


def overview(
    seats: Iterable[SeatFacts],
    lines: Mapping[str, LineFacts],
    cards: Sequence[ModelCard],
    now_s: float,
) -> dict[str, object]:
    """Return the page `/corral/v1/slots`: slots, instances, totals and lines.

    Args:
        seats: The instances.
        lines: Who waits, by model.
        cards: The models that the page is about.
        now_s: The moment, on the clock of the leases.
    """
    shown = _shown(seats, cards)
    slots = all_slots(shown, now_s)
    return {
        "slots": slots,
        "instances": [_instance(seat, slots) for seat in shown],
        "totals": load_of(slots),
        "lines": {card.id: _line(lines[card.id]) for card in cards if card.id in lines},
    }


def engine_list(
    seats: Iterable[SeatFacts], cards: Sequence[ModelCard], now_s: float
) -> list[dict[str, object]]:
    """Return the page `/slots`: the slots of these models, as llama-server lists its own."""
    contexts = {card.id: card.context_length for card in cards}
    slots = all_slots(_shown(seats, cards), now_s)
    return [_as_engine(slot, contexts[slot.model]) for slot in slots]


def has_idle(listed: Sequence[Mapping[str, object]]) -> bool:
    """Return whether a slot of the page `/slots` is free."""
    return any(not slot["is_processing"] for slot in listed)


def _shown(seats: Iterable[SeatFacts], cards: Sequence[ModelCard]) -> list[SeatFacts]:
    """Return the instances of these models, in an order that restarts do not change."""
    order = {card.id: number for number, card in enumerate(cards)}
    shown = (seat for seat in seats if seat.upstream.model in order)

    def place(seat: SeatFacts) -> tuple[int, int, str]:
        name = seat.upstream.name
        return order[seat.upstream.model], len(name), name  # chat.10 comes after chat.9

    return sorted(shown, key=place)


def _line(line: LineFacts) -> dict[str, object]:
    return {
        "interactive": line.interactive,
        "batch": line.batch,
        "oldest_wait_s": round(line.oldest_wait_s, 3),
        "expected_wait_s": round(line.expected_wait_s, 3),
    }


def _instance(seat: SeatFacts, slots: Sequence[Slot]) -> dict[str, object]:
    name = seat.upstream.name
    return {
        "instance": name,
        "model": seat.upstream.model,
        "is_admitted": seat.is_admitted,
        "homes": seat.homes,
        "prefill_tokens_per_second": round(seat.prefill_tps, 2),
        "decode_tokens_per_second": round(seat.decode_tps, 2),
        "draft_acceptance": None if seat.acceptance is None else round(seat.acceptance, 3),
        **_as_page(load_of([slot for slot in slots if slot.instance == name])),
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


def _as_page(part: Slot | Load) -> dict[str, object]:
    """Return its attributes as members."""
    return {name: getattr(part, name) for name in part.__slots__}
