"""`/health` and `/v1/models`, for all models.

An entry of the list has OpenAI's and Anthropic's members, and those that editors and chat clients
read from local servers; no client library rejects the others' members.
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
    """None if at least one model can be served.

    Readable without a key, so it gives counts but no reasons: those name files, flags and engine
    messages.
    """
    states = Counter[str](model_info.state for model_info in model_infos)
    if states["loaded"] or states["unloaded"]:
        return None
    if loading := states["loading"]:
        return ModelLoading(f"no model is loaded yet; {loading} of {len(model_infos)} loading")
    if not model_infos:
        return Unavailable("no model is configured", retry_after_s=10)
    failed = f"{states['failed']} of {len(model_infos)} failed"
    message = f"no model can be served, {failed}; see `corral status` on this machine"
    return Unavailable(message, retry_after_s=10)


def health(
    model_infos: Sequence[ModelInfo], instances: Sequence[InstanceStats]
) -> dict[str, object]:
    """`/health` of a proxy that can serve: models by state, slots by use."""
    states = Counter[str](model_info.state for model_info in model_infos)
    in_service = [instance for instance in instances if instance.in_service]
    busy = sum(len(instance.leases) for instance in in_service)
    return {
        **HEALTHY,
        "models": {state: states[state] for state in _STATES},
        "slots_idle": sum(instance.upstream.slots for instance in in_service) - busy,
        "slots_processing": busy,
    }


def model_list(model_infos: Sequence[ModelInfo], *, for_codex: bool = False) -> dict[str, object]:
    """`/v1/models`: every configured model, loaded or not.

    Args:
        model_infos: The models.
        for_codex: Whether Codex asks. It rejects a list without `models`, and one with an entry
            that lacks any of its own two dozen members; without entries it uses its built-in list.
    """
    return {
        "object": "list",
        "data": [model_json(model_info) for model_info in model_infos],
        "models": [] if for_codex else [_ollama_json(model_info) for model_info in model_infos],
        # Anthropic's clients paginate; this is the last page.
        "has_more": False,
        "first_id": model_infos[0].id if model_infos else None,
        "last_id": model_infos[-1].id if model_infos else None,
    }


def model_json(model_info: ModelInfo) -> dict[str, object]:
    """`/v1/models/{id}`."""
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
        # Read from local servers.
        "aliases": list(model_info.aliases),
        "context_length": model_info.context_length,
        "variant_of": model_info.variant_of,
        "meta": {
            **model_info.meta,
            "n_ctx": model_info.context_length,
            "slots": model_info.slots,
        },
        "status": {
            # Open WebUI and Jan know three states.
            "value": "unloaded" if has_failed else model_info.state,
            "failed": has_failed,
            "reason": model_info.reason,
            **({"loadable": True} if model_info.is_loadable else {}),
        },
        # Further ones of llama-server's router mode.
        "architecture": {
            "input_modalities": list(model_info.input_modalities),
            "output_modalities": ["text"],
        },
        "tags": [],
        "source": "preset",
        "can_remove": False,
    }


def _ollama_json(model_info: ModelInfo) -> dict[str, object]:
    """An entry of Ollama's list as llama-server gives it; empty where neither knows.

    llama.vscode reads its list in place of OpenAI's, by `name` and `id`. Source: build 10434,
    `get_models` of tools/server/server-context.cpp; Ollama's API reference, list local models.
    """
    meta, has_more = model_info.meta, len(model_info.input_modalities) > 1
    return {
        "name": model_info.id,
        "model": model_info.id,
        "id": model_info.id,
        "modified_at": "",
        "size": meta.get("size", ""),
        "digest": "",
        "type": "model",
        "description": "",
        "context_length": model_info.context_length,
        "tags": [""],
        "capabilities": ["completion", *(["multimodal"] if has_more else [])],
        "parameters": "",
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": "",
            "families": [""],
            "parameter_size": parameter_size(meta.get("n_params")),
            "quantization_level": meta.get("ftype", ""),
        },
    }


def parameter_size(count: int | str | None) -> str:
    """As Ollama writes it, such as 134.52M or 8.0B."""
    if not isinstance(count, int):
        return ""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.2f}M"
