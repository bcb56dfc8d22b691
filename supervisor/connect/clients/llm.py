"""llm. Source: its documentation, "Adding more OpenAI models"."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from supervisor.connect.client import Api, Client, FileFormat, FileSettings
from supervisor.connect.facts import Facts, Places, ServedModel
from supervisor.connect.place import Item, Place


def _directory(places: Places) -> Path:
    return places.named("LLM_USER_PATH", places.config / "io.datasette.llm")


def _files(facts: Facts, places: Places) -> Sequence[FileSettings]:
    values: dict[Place, Any] = {
        (Item("model_id", _id(one)),): _model(one, facts) for one in facts.models
    }
    path = _directory(places) / "extra-openai-models.yaml"
    return [FileSettings(path, FileFormat.YAML, values)]


def _model(model: ServedModel, facts: Facts) -> dict[str, Any]:
    found: dict[str, Any] = {
        "model_id": _id(model),
        "model_name": model.name,
        "api_base": facts.api,
        "can_stream": True,
        "supports_schema": True,
        "supports_tools": True,
        "vision": model.sees_images,
    }
    return {**found, "api_key_name": "openai"} if facts.needs_key else found


def _id(model: ServedModel) -> str:
    return f"corral/{model.name}"


LLM: Final = Client(
    name="llm",
    title="llm",
    programs=("llm",),
    api=Api.CHAT,
    directory=_directory,
    files=_files,
    run=lambda facts: f"llm -m {_id(facts.model)} 'Why do llamas hum?'",
    key_variable="OPENAI_API_KEY",
    ca_variable="SSL_CERT_FILE",
)
