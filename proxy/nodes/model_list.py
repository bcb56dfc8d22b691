"""The models that a node offers, read from its page `/v1/models`. Pure.

Every server with OpenAI's API has the page. What each says beyond a model's id differs: another
llama-corral and a llama-server that routes say whether it is loaded, and one that is not is left
alone, for asking for it would have the node load it. llama-corral also says how many slots it has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

_MODELS_MAX: Final = 1024
_NAME_MAX_CHARACTERS: Final = 256
_SLOTS_MAX: Final = 1024


class Unreadable(Exception):
    """A page is not what it should be; the message says how."""


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model that a node can answer for now.

    Attributes:
        id: What the node calls it.
        aliases: What else the node calls it.
        slots: Sequences that are decoded at once, or None where it does not say.
        context_length: Tokens that one request may use, or None where it does not say.
    """

    id: str
    aliases: tuple[str, ...] = ()
    slots: int | None = None
    context_length: int | None = None


def read_remote_models(body: bytes, only: Collection[str] = ()) -> tuple[RemoteModel, ...]:
    """Return what a node offers.

    Args:
        body: Its page `/v1/models`.
        only: Ids of those that count; empty for all.

    Raises:
        Unreadable: It is no list of models, or one of more than 1024.
    """
    entries = _list(body, "data")
    if len(entries) > _MODELS_MAX:
        raise Unreadable(f"its list of models has more than {_MODELS_MAX} entries")
    remote_models = {entry["id"]: _remote_model(entry) for entry in entries if _is_served(entry)}
    return tuple(
        remote_model
        for remote_model in remote_models.values()
        if not only or remote_model.id in only
    )


def count_slots(body: bytes) -> int | None:
    """Return how many slots the page `/slots` lists; None where it is no such list."""
    try:
        slots = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return len(slots) if isinstance(slots, list) and 1 <= len(slots) <= _SLOTS_MAX else None


def _list(body: bytes, member: str) -> list[Any]:
    try:
        page = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Unreadable(f"its list of models is not JSON: {error}") from error
    entries = page.get(member) if isinstance(page, dict) else None
    if not isinstance(entries, list):
        raise Unreadable("it has no list of models; is its url right?")
    return entries


def _is_served(entry: object) -> bool:
    """Return whether an entry is a model, and loaded if it says anything of that."""
    if not isinstance(entry, dict) or not _is_name(entry.get("id")):
        return False
    status = entry.get("status")
    return not isinstance(status, dict) or status.get("value", "loaded") == "loaded"


def _remote_model(entry: Mapping[str, Any]) -> RemoteModel:
    meta = entry.get("meta")
    said: Mapping[str, Any] = meta if isinstance(meta, dict) else {}
    slots = _count(said.get("slots"))
    return RemoteModel(
        id=entry["id"],
        aliases=tuple(_aliases(entry)),
        slots=min(slots, _SLOTS_MAX) if slots else None,
        context_length=_count(entry.get("context_length")) or _count(said.get("n_ctx")),
    )


def _aliases(entry: Mapping[str, Any]) -> Iterator[str]:
    aliases = entry.get("aliases")
    for alias in aliases if isinstance(aliases, list) else ():
        if _is_name(alias) and alias != entry["id"]:
            yield alias


def _is_name(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= _NAME_MAX_CHARACTERS and name.isprintable()


def _count(said: object) -> int | None:
    """Return a whole number above 0, or None."""
    return said if isinstance(said, int) and not isinstance(said, bool) and said > 0 else None
