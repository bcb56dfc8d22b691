"""Settings of client programs, as `corral connect` shows them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from proxy.dashboard.host import ClientFile, Clients, ClientSettings
from proxy.errors import UnknownModel
from proxy.models import ModelInfo
from supervisor.connect.certificate import self_signed
from supervisor.connect.client import Client
from supervisor.connect.clients import CLIENTS
from supervisor.connect.facts import KEY_VARIABLE, Facts, Places, ServedModel
from supervisor.connect.shown import notes_of, text_of
from supervisor.errors import CorralError
from supervisor.fleet.planner import LaunchPlanner
from supervisor.gguf.capabilities import makes_vectors


def clients_of(facts: Facts, config: Path) -> Clients:
    """The settings of all clients; reads which files they have."""
    places = Places(Path.home(), dict(os.environ), config)
    names = tuple(one.name for one in facts.models)
    clients = tuple(_shown(one, facts, places) for one in CLIENTS)
    return Clients(names, facts.model.name, KEY_VARIABLE, clients)


def facts_of(
    url: str,
    models: Sequence[ServedModel],
    wanted: str | None,
    *,
    needs_key: bool,
    cert: str | None,
) -> Facts | None:
    """What clients are told; None: no model answers chats. Raises UnknownModel."""
    names = [one.name for one in models]
    if wanted and wanted not in names:
        raise UnknownModel(wanted, names)
    if not models:
        return None
    chosen = models[names.index(wanted) if wanted else 0]
    return Facts(url, tuple(models), chosen, chosen, needs_key, self_signed(cert))


def chat_models(infos: Sequence[ModelInfo], planner: LaunchPlanner) -> list[ServedModel]:
    """The models that answer chats, as far as this machine knows; reads files."""
    return [
        ServedModel(one.id, one.context_length, sees_images="image" in one.input_modalities)
        for one in infos
        if not (one.is_local and _makes_vectors(one.id, planner))
    ]


def _makes_vectors(model: str, planner: LaunchPlanner) -> bool:
    try:
        return makes_vectors(planner.gguf(model), planner.entry(model).flags)
    except CorralError:  # its start reports why
        return False


def _shown(client: Client, facts: Facts, places: Places) -> ClientSettings:
    files = tuple(
        ClientFile(_short(one.path, places.home), text_of(one))
        for one in client.files(facts, places)
    )
    return ClientSettings(
        client.name,
        client.title,
        files,
        tuple(notes_of(client, facts)),
        f"corral connect {client.name} --write",
        client.run(facts),
    )


def _short(path: Path, home: Path) -> str:
    return f"~/{path.relative_to(home)}" if path.is_relative_to(home) else str(path)
