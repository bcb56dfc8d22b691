"""aider. Source: its documentation, "YAML config file", "Advanced model settings"."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from supervisor.connect.client import Api, Client, FileFormat, FileSettings
from supervisor.connect.facts import NO_KEY, Facts, Places, ServedModel
from supervisor.connect.place import Place


def _directory(places: Places) -> Path:
    return places.home


def _files(facts: Facts, places: Places) -> Sequence[FileSettings]:
    values: dict[Place, Any] = {
        ("model",): _name(facts.model),
        ("weak-model",): _name(facts.small),
        ("openai-api-base",): facts.api,
        # It knows no costs of these models and would ask about each.
        ("show-model-warnings",): False,
    }
    if not facts.needs_key:
        values["openai-api-key",] = NO_KEY
    sizes: dict[Place, Any] = {
        (_name(one),): {
            "max_input_tokens": one.context_tokens,
            "max_output_tokens": one.context_tokens,
            "litellm_provider": "openai",
            "mode": "chat",
        }
        for one in facts.models
        if one.context_tokens
    }
    files = [FileSettings(places.home / ".aider.conf.yml", FileFormat.YAML, values)]
    if sizes:
        path = places.home / ".aider.model.metadata.json"
        files.append(FileSettings(path, FileFormat.JSON, sizes))
    return files


def _name(model: ServedModel) -> str:
    return f"openai/{model.name}"


AIDER: Final = Client(
    name="aider",
    title="aider",
    programs=("aider",),
    api=Api.CHAT,
    directory=_directory,
    files=_files,
    run=lambda _: "aider",
    key_variable="OPENAI_API_KEY",
    ca_variable="SSL_CERT_FILE",
)
