"""Codex. Source: openai/codex, docs/config.md; it speaks the Responses API alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from supervisor.connect.client import Api, Client, FileFormat, FileSettings
from supervisor.connect.facts import KEY_VARIABLE, Facts, Places
from supervisor.connect.place import Place

# A long prompt on a slow machine sends nothing for a while.
_IDLE_MS: Final = 3_600_000


def _directory(places: Places) -> Path:
    return places.named("CODEX_HOME", places.home / ".codex")


def _files(facts: Facts, places: Places) -> Sequence[FileSettings]:
    provider = {
        "name": "llama-corral",
        "base_url": facts.api,
        "wire_api": "responses",
        "stream_idle_timeout_ms": _IDLE_MS,
    }
    if facts.needs_key:
        provider["env_key"] = KEY_VARIABLE
    values: dict[Place, Any] = {("model",): facts.model.name, ("model_provider",): "corral"}
    if facts.model.context_tokens:
        values["model_context_window",] = facts.model.context_tokens
    values["model_providers", "corral"] = provider
    return [FileSettings(_directory(places) / "config.toml", FileFormat.TOML, values)]


CODEX: Final = Client(
    name="codex",
    title="Codex",
    programs=("codex",),
    api=Api.RESPONSES,
    directory=_directory,
    files=_files,
    run=lambda _: "codex",
    key_variable=KEY_VARIABLE,
    ca_variable="CODEX_CA_CERTIFICATE",
    context_least=16_384,
)
