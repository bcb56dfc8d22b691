"""Zed. Source: its documentation, "Use API access", OpenAI-compatible endpoints.

It looks for the key of a provider in NAME_API_KEY, so that of `corral` in CORRAL_API_KEY.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from supervisor.connect.client import Api, Client, FileFormat, FileSettings
from supervisor.connect.facts import KEY_VARIABLE, Facts, Places, ServedModel
from supervisor.connect.place import Place

# It wants a figure for each model.
_CONTEXT_TOKENS: Final = 32_768


def _directory(places: Places) -> Path:
    return places.config / "zed"


def _files(facts: Facts, places: Places) -> Sequence[FileSettings]:
    provider = {"api_url": facts.api, "available_models": [_model(one) for one in facts.models]}
    values: dict[Place, Any] = {
        ("language_models", "openai_compatible", "corral"): provider,
        ("agent", "default_model"): {"provider": "corral", "model": facts.model.name},
    }
    return [FileSettings(_directory(places) / "settings.json", FileFormat.JSON, values)]


def _model(model: ServedModel) -> dict[str, Any]:
    able = {"tools": True, "images": model.sees_images}
    able |= {"parallel_tool_calls": False, "prompt_cache_key": False}
    return {
        "name": model.name,
        "display_name": model.name,
        "max_tokens": model.context_tokens or _CONTEXT_TOKENS,
        "capabilities": able,
    }


ZED: Final = Client(
    name="zed",
    title="Zed",
    programs=("zed", "zeditor"),
    api=Api.CHAT,
    directory=_directory,
    files=_files,
    run=lambda _: "zed (with CORRAL_API_KEY set to any text where the daemon needs no key)",
    key_variable=KEY_VARIABLE,
    ca_variable="SSL_CERT_FILE",
)
