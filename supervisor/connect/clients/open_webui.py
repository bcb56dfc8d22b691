"""Open WebUI, by its variables. Source: its documentation, "Environment configuration".

What a user changes in its pages wins over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from supervisor.connect.client import Api, Client, FileFormat, FileSettings
from supervisor.connect.facts import NO_KEY, Facts, Places
from supervisor.connect.place import Place

_FILE: Final = "open-webui.env"


def _directory(places: Places) -> Path:
    return places.corral


def _files(facts: Facts, places: Places) -> Sequence[FileSettings]:
    variables = {
        "OPENAI_API_BASE_URL": facts.api,
        "ENABLE_OPENAI_API": "true",
        "ENABLE_OLLAMA_API": "false",
        "DEFAULT_MODELS": facts.model.name,
        "TASK_MODEL_EXTERNAL": facts.small.name,
    }
    if not facts.needs_key:
        variables["OPENAI_API_KEY"] = NO_KEY
    if facts.certificate:
        variables["SSL_CERT_FILE"] = str(facts.certificate)
    values: dict[Place, Any] = {(name,): value for name, value in variables.items()}
    return [FileSettings(_directory(places) / _FILE, FileFormat.ENV, values)]


OPEN_WEBUI: Final = Client(
    name="openwebui",
    title="Open WebUI",
    programs=("open-webui",),
    api=Api.CHAT,
    directory=_directory,
    files=_files,
    run=lambda _: f"set -a; . the file {_FILE}; set +a; open-webui serve",
    key_variable="OPENAI_API_KEY",
    ca_variable="SSL_CERT_FILE",
    writes_ca=True,
)
