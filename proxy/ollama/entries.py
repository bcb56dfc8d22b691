"""Models as `/api/tags`, `/api/show` and `/api/ps` list them. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from proxy.metrics.models_endpoint import parameter_size
from proxy.models import ModelInfo
from proxy.ollama.host import ModelDetails, Residence
from proxy.ollama.names import tagged

# What Ollama shows as "Forever" is a date far away; its clients need one.
_FOR_EVER: Final = timedelta(days=365 * 100)


def tag(model_info: ModelInfo, details: ModelDetails) -> dict[str, Any]:
    name = tagged(model_info.id)
    return {
        "name": name,
        "model": name,
        "modified_at": _date(model_info.created),
        "size": model_info.meta.get("size", 0),
        "digest": _digest(model_info),
        "details": _details(model_info, details),
    }


def show(model_info: ModelInfo, details: ModelDetails) -> dict[str, Any]:
    template = details.chat_template
    return {
        "license": "",
        "modelfile": f"# This model is configured in corral.toml.\nFROM {model_info.id}\n",
        "parameters": f"num_ctx {model_info.context_length}" if model_info.context_length else "",
        "template": template,
        "details": _details(model_info, details),
        "model_info": _facts(model_info, details.architecture or "unknown"),
        "capabilities": list(details.capabilities),
        "modified_at": _date(model_info.created),
    }


def running(
    model_info: ModelInfo, details: ModelDetails, residence: Residence, now: datetime
) -> dict[str, Any]:
    left_s = residence.unload_in_s
    expires = now + (_FOR_EVER if left_s is None else timedelta(seconds=left_s))
    listed = tag(model_info, details)
    del listed["modified_at"]
    return {
        **listed,
        "size": residence.memory_bytes or listed["size"],
        "expires_at": expires.isoformat(),
        "size_vram": residence.gpu_bytes,
        "context_length": model_info.context_length or 0,
    }


def _details(model_info: ModelInfo, details: ModelDetails) -> dict[str, Any]:
    family = details.architecture
    return {
        "parent_model": "",
        "format": "gguf",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": parameter_size(model_info.meta.get("n_params")),
        "quantization_level": str(model_info.meta.get("ftype", "")).split(" ")[0],
    }


def _facts(model_info: ModelInfo, architecture: str) -> Mapping[str, object]:
    """What the model's file says, by GGUF's names; the context is that of one request here."""
    meta = model_info.meta
    found = {
        "general.architecture": architecture,
        "general.parameter_count": meta.get("n_params"),
        f"{architecture}.context_length": model_info.context_length or meta.get("n_ctx_train"),
        f"{architecture}.embedding_length": meta.get("n_embd"),
        f"{architecture}.vocab_size": meta.get("n_vocab"),
    }
    return {name: value for name, value in found.items() if value is not None}


def _digest(model_info: ModelInfo) -> str:
    """Of what is known of the entry: no file is hashed for a list."""
    known = (model_info.id, sorted(model_info.meta.items()))
    return hashlib.sha256(repr(known).encode()).hexdigest()


def _date(unix_s: int) -> str:
    return datetime.fromtimestamp(unix_s, tz=UTC).isoformat()
