"""The models of nodes: read from their `/v1/models`. Pure.

Every server with OpenAI's API has that endpoint; beyond a model's id they differ. Another
llama-corral and a llama-server in router mode report whether a model is loaded; one that is not is
ignored, because a request would make the node load it, unless the node agrees to that and is to be
asked. llama-corral also reports its slots.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import orjson

from proxy.adapter import MARK
from proxy.models import ModelNames
from proxy.variant import SEPARATOR

# More than any machine serves. All names of all nodes are merged whenever one of them changes.
_MODELS_MAX: Final = 512
_NAMES_MAX: Final = 2048
_NAME_MAX_CHARACTERS: Final = 256
_SLOTS_MAX: Final = 1024
_CHOOSE: Final = "choose some with `models` in its table of the settings"
# Of `meta` in llama-server's list.
_META_NUMBERS: Final = ("vocab_type", "n_vocab", "n_ctx_train", "n_embd", "n_params", "size")


RemoteState = Literal["loaded", "loading", "unloaded"]
_LOADED: Final = frozenset({"loaded"})
_LOADABLE: Final = frozenset({"loaded", "loading", "unloaded"})


class Unreadable(Exception):
    """A response is not a list of models."""


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model that a node has; None for what it does not report.

    Attributes:
        state: Of one that is not loaded, the node agrees to load it.
    """

    id: str
    aliases: tuple[str, ...] = ()
    slots: int | None = None
    context_length: int | None = None
    meta: Mapping[str, int | str] = field(default_factory=dict)
    variants: tuple[str, ...] = ()
    state: RemoteState = "loaded"

    @property
    def is_loaded(self) -> bool:
        return self.state == "loaded"


@dataclass(frozen=True, slots=True)
class OfferedModel:
    """A model of a node; `problem` is why the node cannot serve it now, or load it."""

    remote_model: RemoteModel
    slots: int
    node: str
    problem: str | None = None


def read_remote_models(
    body: bytes, only: Collection[str] = (), *, with_loadable: bool = False
) -> tuple[RemoteModel, ...]:
    """The loaded models in a node's `/v1/models`, and those that it would load, if asked for.

    `only` these ids unless empty.

    Raises Unreadable if it is not a list of models, or has more than 512 of them or 2048 names.
    """
    entries = _entries(body)
    states = _LOADABLE if with_loadable else _LOADED
    loaded = {entry["id"]: entry for entry in entries if _state(entry) in states}
    served = {model: entry for model, entry in loaded.items() if not only or model in only}
    if len(served) > _MODELS_MAX:
        raise Unreadable(f"it lists more than {_MODELS_MAX} models; {_CHOOSE}")
    variants: dict[str, list[str]] = {}
    for model, entry in served.items():
        if (base := _base_of(entry)) and base in served:
            variants.setdefault(base, []).append(model)
    among = {variant for names in variants.values() for variant in names}
    found = tuple(
        _remote_model(entry, variants.get(model, ()))
        for model, entry in served.items()
        if model not in among
    )
    if sum(map(names_of, found)) > _NAMES_MAX:
        raise Unreadable(f"its models have more than {_NAMES_MAX} names; {_CHOOSE}")
    return found


def names_of(remote_model: RemoteModel) -> int:
    """The number of names by which a model can be requested, with its variants'."""
    return (1 + len(remote_model.aliases)) * (1 + len(remote_model.variants))


def count_slots(body: bytes) -> int | None:
    """The number of slots in a node's `/slots`; None if it is not such a list."""
    try:
        slots = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return len(slots) if isinstance(slots, list) and 1 <= len(slots) <= _SLOTS_MAX else None


def _entries(body: bytes) -> list[Any]:
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Unreadable(f"its list of models is not JSON: {error}") from error
    entries = content.get("data") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise Unreadable("it has no list of models; check its url")
    return entries


def _state(entry: object) -> RemoteState | None:
    """Whether an entry is a model that is loaded, as far as the node reports that."""
    if not isinstance(entry, dict) or not _is_name(entry.get("id")):
        return None
    status = entry.get("status")
    if not isinstance(status, dict):
        return "loaded"
    match status.get("value", "loaded"):
        case "loaded":
            return "loaded"
        case "loading":
            return "loading"
        case "unloaded" if status.get("loadable") is True:
            return "unloaded"
        case _:
            return None


def _remote_model(entry: Mapping[str, Any], variants: Iterable[str]) -> RemoteModel:
    meta = entry.get("meta")
    members: Mapping[str, Any] = meta if isinstance(meta, dict) else {}
    slots = _positive(members.get("slots"))
    return RemoteModel(
        id=entry["id"],
        aliases=tuple(_aliases(entry)),
        slots=min(slots, _SLOTS_MAX) if slots else None,
        context_length=_positive(entry.get("context_length")) or _positive(members.get("n_ctx")),
        meta=_meta(members),
        variants=tuple(sorted(_variant_name(one, entry["id"]) for one in variants)),
        state=_state(entry) or "loaded",
    )


def _base_of(entry: Mapping[str, Any]) -> str | None:
    """Return the model of which an entry is a variant, by llama-corral's own member."""
    base = entry.get("variant_of")
    if isinstance(base, str) and entry["id"].startswith((base + SEPARATOR, base + MARK)):
        return base
    return None


def _variant_name(name: str, base: str) -> str:
    """Return the name of a variant; that of an adapter has its mark before it."""
    return name.removeprefix(base).removeprefix(SEPARATOR)


def _meta(members: Mapping[str, Any]) -> dict[str, int | str]:
    numbers = {name: _positive(members.get(name)) for name in _META_NUMBERS}
    meta: dict[str, int | str] = {name: number for name, number in numbers.items() if number}
    return meta | ({"ftype": members["ftype"]} if _is_name(members.get("ftype")) else {})


def _aliases(entry: Mapping[str, Any]) -> Iterator[str]:
    aliases = entry.get("aliases")
    for alias in aliases if isinstance(aliases, list) else ():
        if _is_name(alias) and alias != entry["id"]:
            yield alias


def _is_name(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= _NAME_MAX_CHARACTERS and name.isprintable()


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def served_id(remote_model: RemoteModel, local: ModelNames) -> str | None:
    """The id under which a node's model is served here.

    That of the local model with one of its names, else its own; None if its name is a variant of a
    local model, which only the local model serves.
    """
    for name in (remote_model.id, *remote_model.aliases):
        if found := local.get(name):
            return None if found.variant or found.adapter else found.model_info.id
    return remote_model.id
