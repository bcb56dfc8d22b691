"""Names of models with Ollama's tag: `chat` and `chat:latest` are one. Pure."""

from __future__ import annotations

from typing import Any, Final

from proxy.errors import BadRequest
from proxy.models import ModelNames
from proxy.request import named_model

_LATEST: Final = ":latest"
_HUB: Final = "hf.co/"


def tagged(name: str) -> str:
    """Return a model's name as Ollama lists it."""
    return name if ":" in name else name + _LATEST


def untagged(name: str | None, names: ModelNames) -> str | None:
    """Return the name that is configured for one that a client gave.

    A client may put the host of the hub before the name of a model that it pulled from there.
    """
    if not name or names.get(name):
        return name
    short = name.removesuffix(_LATEST).removeprefix(_HUB)
    return short if names.get(short) or not name.startswith(_HUB) else name


def given_name(members: dict[str, Any]) -> str | None:
    """Return the model that a body names, by the older member too; raises BadRequest."""
    name = named_model(members)
    if name is None and (older := members.get("name")) is not None:
        return named_model({"model": older})
    return name


def required_name(members: dict[str, Any]) -> str:
    """As `given_name`; raises BadRequest where there is none."""
    if not (name := given_name(members)):
        raise BadRequest('the request names no model; send {"model": NAME}')
    return name
