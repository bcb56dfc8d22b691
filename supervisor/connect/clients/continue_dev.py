"""Continue. Source: its documentation, "config.yaml reference".

Its secrets come from the environment, or from the file .env beside.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from supervisor.connect.client import Api, Client, FileFormat, FileSettings
from supervisor.connect.facts import KEY_VARIABLE, NO_KEY, Facts, Places, ServedModel
from supervisor.connect.place import Item, Place


def _directory(places: Places) -> Path:
    return places.named("CONTINUE_GLOBAL_DIR", places.home / ".continue")


def _files(facts: Facts, places: Places) -> Sequence[FileSettings]:
    values: dict[Place, Any] = {
        ("models", Item("name", _title(one))): _model(one, facts) for one in facts.models
    }
    required: dict[Place, Any] = {("name",): "Local", ("version",): "0.0.1", ("schema",): "v1"}
    path = _directory(places) / "config.yaml"
    return [FileSettings(path, FileFormat.YAML, values, required)]


def _model(model: ServedModel, facts: Facts) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": _title(model),
        "provider": "openai",
        "model": model.name,
        "apiBase": facts.api,
        "apiKey": f"${{{{ secrets.{KEY_VARIABLE} }}}}" if facts.needs_key else NO_KEY,
        "roles": ["chat", "edit", "apply"],
        "capabilities": ["tool_use", *(["image_input"] if model.sees_images else [])],
    }
    if model.context_tokens:
        found["defaultCompletionOptions"] = {"contextLength": model.context_tokens}
    if facts.certificate:
        found["requestOptions"] = {"caBundlePath": str(facts.certificate)}
    return found


def _title(model: ServedModel) -> str:
    return f"{model.name} (llama-corral)"


CONTINUE: Final = Client(
    name="continue",
    title="Continue",
    programs=("cn",),
    api=Api.CHAT,
    directory=_directory,
    files=_files,
    run=lambda facts: f"choose {_title(facts.model)} in the list of models",
    key_variable=KEY_VARIABLE,
    ca_variable="NODE_EXTRA_CA_CERTS",
    writes_ca=True,
)
