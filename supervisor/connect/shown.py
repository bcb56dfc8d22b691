"""Settings of a client program as people read them. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from supervisor.connect.client import Client, FileSettings
from supervisor.connect.facts import KEY_VARIABLE, Facts
from supervisor.connect.formats.texts import texts_of


def text_of(settings: FileSettings) -> str:
    """The text of a new file with these settings."""
    texts, text = texts_of(settings.format), ""
    for place, value in {**settings.defaults, **settings.values}.items():
        text = texts.put(text, place, value)
    return text


def notes_of(client: Client, facts: Facts) -> Sequence[str]:
    """Return what else the user has to do, a sentence each."""
    notes = []
    model = facts.model
    if model.context_tokens is not None and model.context_tokens < client.context_least:
        notes.append(
            f"{model.name} has a context of {model.context_tokens} tokens, and the prompt of "
            f"{client.title} takes some 10000: choose a model with {client.context_least} or more, "
            f"or raise ctx-size under [models.{model.name}.flags] if the model was trained for it"
        )
    if facts.needs_key:
        same = client.key_variable == KEY_VARIABLE
        source = "" if same else f' (export {client.key_variable}="${KEY_VARIABLE}")'
        notes.append(f"{client.title} reads the API key from {client.key_variable}{source}")
    if facts.certificate and not client.writes_ca:
        notes.append(
            f"{client.title} must trust the certificate: "
            f"export {client.ca_variable}={facts.certificate}"
        )
    elif facts.url.startswith("https:") and not facts.certificate:
        notes.append(
            "where no public CA issued the certificate, the client must trust the CA that did: "
            f"export {client.ca_variable}=FILE.pem"
        )
    return notes
