"""The settings of client programs that `corral connect` writes; imported when first needed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from proxy.dashboard.host import ClientFile, Clients, ClientSettings
from proxy.errors import UnknownModel
from proxy.request.models import ModelInfo
from supervisor.clients.client import (
    KEY_VARIABLE,
    ClientProgram,
    Facts,
    Places,
    ServedModel,
    self_signed,
)
from supervisor.clients.journal import notes_of, text_of
from supervisor.clients.programs import CLIENTS
from supervisor.errors import CorralError
from supervisor.fleet.planner import LaunchPlanner
from supervisor.models.model_meta import makes_vectors


def clients_of(facts: Facts, config: Path) -> Clients:
    """Return the settings of all clients; reads which files they have."""
    places = Places(Path.home(), dict(os.environ), config)
    names = tuple(model.name for model in facts.models)
    clients = tuple(_client_settings(client, facts, places) for client in CLIENTS)
    return Clients(names, facts.model.name, KEY_VARIABLE, clients)


def facts_of(
    url: str,
    models: Sequence[ServedModel],
    wanted: str | None,
    *,
    needs_key: bool,
    cert: str | None,
) -> Facts | None:
    """Return the facts for clients; None if no model answers chats. Raises UnknownModel."""
    names = [model.name for model in models]
    if wanted and wanted not in names:
        raise UnknownModel(wanted, names)
    if not models:
        return None
    chosen = models[names.index(wanted) if wanted else 0]
    return Facts(url, tuple(models), chosen, chosen, needs_key, self_signed(cert))


def chat_models(infos: Sequence[ModelInfo], planner: LaunchPlanner) -> list[ServedModel]:
    """Return the models that answer chats, as far as this machine knows; reads files."""
    return [
        ServedModel(model.id, model.context_length, sees_images="image" in model.input_modalities)
        for model in infos
        if not (model.is_local and _makes_vectors(model.id, planner))
    ]


def _makes_vectors(model: str, planner: LaunchPlanner) -> bool:
    try:
        return makes_vectors(planner.gguf(model), planner.entry(model).flags)
    except CorralError:  # its start reports why
        return False


def _client_settings(client: ClientProgram, facts: Facts, places: Places) -> ClientSettings:
    def shorten(path: Path) -> str:
        home = places.home
        return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)

    files = tuple(
        ClientFile(shorten(file.path), text_of(file)) for file in client.files(facts, places)
    )
    return ClientSettings(
        client.name,
        client.title,
        files,
        tuple(notes_of(client, facts)),
        f"corral connect {client.name} --write",
        client.run(facts),
    )
