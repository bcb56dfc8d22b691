"""The pages that the proxy answers for all instances: health and models."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.dispatch import ModelCard
from proxy.errors import Loading, ProxyError, Unavailable


def sickness(cards: Sequence[ModelCard]) -> ProxyError | None:
    """Return why no model can be served, or None where at least one can."""
    if any(card.state in {"loaded", "unloaded"} for card in cards):
        return None
    loading = [card.id for card in cards if card.state == "loading"]
    if loading:
        return Loading(f"loading {', '.join(loading)}")
    failed = [f"{card.id}: {card.reason or 'failed'}" for card in cards]
    return Unavailable("; ".join(failed) or "no model is configured", retry_after_s=10)


def model_list(cards: Sequence[ModelCard]) -> dict[str, object]:
    """Return the page `/v1/models`: every configured model, loaded or not."""
    return {"object": "list", "data": [model_page(card) for card in cards]}


def model_page(card: ModelCard) -> dict[str, object]:
    """Return the page `/v1/models/{id}`.

    OpenAI's members come first; `context_length` and `status` are what editors and chat clients
    read of a local server, and they know no other states than these three.
    """
    has_failed = card.state == "failed"
    return {
        "id": card.id,
        "object": "model",
        "created": card.created,
        "owned_by": "llama-corral",
        "context_length": card.context_length,
        "aliases": list(card.aliases),
        "status": {
            "value": "unloaded" if has_failed else card.state,
            "failed": has_failed,
            "reason": card.reason,
        },
    }
