"""opencode. Source: its documentation, pages "Config" and "Providers"."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from supervisor.connect.client import Api, Client, FileFormat, FileSettings
from supervisor.connect.facts import KEY_VARIABLE, NO_KEY, Facts, Places, ServedModel
from supervisor.connect.place import Place

# Of the context, what an answer may take.
_ANSWER_SHARE: Final = 4


def _directory(places: Places) -> Path:
    return places.config / "opencode"


def _path(places: Places) -> Path:
    if given := places.environ.get("OPENCODE_CONFIG"):
        return Path(given)
    commented = _directory(places) / "opencode.jsonc"
    return commented if commented.exists() else _directory(places) / "opencode.json"


def _files(facts: Facts, places: Places) -> Sequence[FileSettings]:
    key = f"{{env:{KEY_VARIABLE}}}" if facts.needs_key else NO_KEY
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "llama-corral",
        "options": {"baseURL": facts.api, "apiKey": key},
        "models": {one.name: _model(one) for one in facts.models},
    }
    values: dict[Place, Any] = {
        ("provider", "corral"): provider,
        ("model",): f"corral/{facts.model.name}",
        ("small_model",): f"corral/{facts.small.name}",
    }
    defaults: dict[Place, Any] = {("$schema",): "https://opencode.ai/config.json"}
    return [FileSettings(_path(places), FileFormat.JSON, values, defaults)]


def _model(model: ServedModel) -> dict[str, Any]:
    found: dict[str, Any] = {"name": model.name, "tool_call": True}
    if tokens := model.context_tokens:
        found["limit"] = {"context": tokens, "output": tokens // _ANSWER_SHARE}
    if model.sees_images:
        found |= {
            "attachment": True,
            "modalities": {"input": ["text", "image"], "output": ["text"]},
        }
    return found


OPENCODE: Final = Client(
    name="opencode",
    title="opencode",
    programs=("opencode",),
    api=Api.CHAT,
    directory=_directory,
    files=_files,
    run=lambda _: "opencode",
    key_variable=KEY_VARIABLE,
    ca_variable="NODE_EXTRA_CA_CERTS",
    context_least=16_384,
)
