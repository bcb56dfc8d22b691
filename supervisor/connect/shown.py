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
    """What its user has to do besides."""
    notes = []
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
