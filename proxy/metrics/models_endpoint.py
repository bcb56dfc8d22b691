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

from proxy.errors import ModelLoading, ProxyError, Unavailable
from proxy.models import ModelInfo
from proxy.router.instances import InstanceStats

HEALTHY: Final = MappingProxyType({"status": "ok"})
_STATES: Final = ("loaded", "loading", "unloaded", "failed")


def unavailable_reason(model_infos: Sequence[ModelInfo]) -> ProxyError | None:
    """Return that no model can be served, or None where at least one can.

    Anybody who reaches the port may ask for this, so it counts and gives no reason: reasons name
    files, flags and what an engine said.
    """
    states = Counter[str](model_info.state for model_info in model_infos)
    if states["loaded"] or states["unloaded"]:
        return None
    if loading := states["loading"]:
        return ModelLoading(f"no model is loaded yet; {loading} of {len(model_infos)} loading")
    if not model_infos:
        return Unavailable("no model is configured", retry_after_s=10)
    told = f"no model can be served, {states['failed']} of {len(model_infos)} failed; corral status"
    return Unavailable(f"{told} on this machine tells why", retry_after_s=10)


def health(
    model_infos: Sequence[ModelInfo], instances: Sequence[InstanceStats]
) -> dict[str, object]:
    """Return the page `/health` of a proxy that can serve: models by state, slots by use."""
    states = Counter[str](model_info.state for model_info in model_infos)
    admitted = [instance for instance in instances if instance.in_service]
    busy = sum(len(instance.leases) for instance in admitted)
    return {
        **HEALTHY,
        "models": {state: states[state] for state in _STATES},
        "slots_idle": sum(instance.upstream.slots for instance in admitted) - busy,
        "slots_processing": busy,
    }


def model_list(model_infos: Sequence[ModelInfo]) -> dict[str, object]:
    """Return the page `/v1/models`: every configured model, loaded or not."""
    pages = [model_page(model_info) for model_info in model_infos]
    return {
        "object": "list",
        "data": pages,
        # Codex refuses a list without this member, and the whole of it for one entry that lacks
        # any of its own two dozen; without entries it goes on with what it knows.
        "models": [],
        # Anthropic's clients ask page by page; this is the last.
        "has_more": False,
        "first_id": model_infos[0].id if model_infos else None,
        "last_id": model_infos[-1].id if model_infos else None,
    }


def model_page(model_info: ModelInfo) -> dict[str, object]:
    """Return the page `/v1/models/{id}`.

    The states in `status` are the three that Open WebUI and Jan know; `failed` stands beside them.
    """
    has_failed = model_info.state == "failed"
    return {
        # OpenAI's.
        "id": model_info.id,
        "object": "model",
        "created": model_info.created,
        "owned_by": "llama-corral",
        # Anthropic's.
        "type": "model",
        "display_name": model_info.id,
        "created_at": datetime.fromtimestamp(model_info.created, tz=UTC).isoformat(),
        "max_input_tokens": model_info.context_length,
        # What is read of local servers.
        "aliases": list(model_info.aliases),
        "context_length": model_info.context_length,
        "meta": {"n_ctx": model_info.context_length, "slots": model_info.slots},
        "status": {
            "value": "unloaded" if has_failed else model_info.state,
            "failed": has_failed,
            "reason": model_info.reason,
        },
    }
