"""The pages that the proxy answers for all models: health, and the list of models.

Each client library wants members of its own, and none minds the others': an entry of the list is
OpenAI's and Anthropic's at once, and says beside it what editors and chat clients read of a local
server.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Final

from proxy.errors import Loading, ProxyError, Unavailable
from proxy.line.seats import SeatFacts
from proxy.loader import ModelCard

HEALTHY: Final = MappingProxyType({"status": "ok"})
_STATES: Final = ("loaded", "loading", "unloaded", "failed")


def sickness(cards: Sequence[ModelCard]) -> ProxyError | None:
    """Return that no model can be served, or None where at least one can.

    Anybody who reaches the port may ask for this, so it counts and gives no reason: reasons name
    files, flags and what an engine said.
    """
    states = Counter[str](card.state for card in cards)
    if states["loaded"] or states["unloaded"]:
        return None
    if loading := states["loading"]:
        return Loading(f"no model is loaded yet; {loading} of {len(cards)} loading")
    if not cards:
        return Unavailable("no model is configured", retry_after_s=10)
    told = f"no model can be served, {states['failed']} of {len(cards)} failed; corral status"
    return Unavailable(f"{told} on this machine tells why", retry_after_s=10)


def health(cards: Sequence[ModelCard], seats: Sequence[SeatFacts]) -> dict[str, object]:
    """Return the page `/health` of a proxy that can serve: models by state, slots by use."""
    states = Counter[str](card.state for card in cards)
    admitted = [seat for seat in seats if seat.is_admitted]
    busy = sum(len(seat.leases) for seat in admitted)
    return {
        **HEALTHY,
        "models": {state: states[state] for state in _STATES},
        "slots_idle": sum(seat.upstream.slots for seat in admitted) - busy,
        "slots_processing": busy,
    }


def model_list(cards: Sequence[ModelCard]) -> dict[str, object]:
    """Return the page `/v1/models`: every configured model, loaded or not."""
    pages = [model_page(card) for card in cards]
    return {
        "object": "list",
        "data": pages,
        # Codex refuses a list without this member, and the whole of it for one entry that lacks
        # any of its own two dozen; without entries it goes on with what it knows.
        "models": [],
        # Anthropic's clients ask page by page; this is the last.
        "has_more": False,
        "first_id": cards[0].id if cards else None,
        "last_id": cards[-1].id if cards else None,
    }


def model_page(card: ModelCard) -> dict[str, object]:
    """Return the page `/v1/models/{id}`.

    The states in `status` are the three that Open WebUI and Jan know; `failed` stands beside them.
    """
    has_failed = card.state == "failed"
    return {
        # OpenAI's.
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "llama-corral",
        # Anthropic's.
        "type": "model",
        "display_name": card.id,
        "created_at": datetime.fromtimestamp(card.created, tz=UTC).isoformat(),
        "max_input_tokens": card.context_length,
        # What is read of local servers.
        "aliases": list(card.aliases),
        "context_length": card.context_length,
        "meta": {"n_ctx": card.context_length, "slots": card.slots},
        "status": {
            "value": "unloaded" if has_failed else card.state,
            "failed": has_failed,
            "reason": card.reason,
        },
    }
