"""The models of nodes: read from their `/v1/models`, and merged with the local ones. Pure.

Every server with OpenAI's API has that endpoint; beyond a model's id they differ. Another
llama-corral and a llama-server in router mode report whether a model is loaded; one that is not is
ignored, because a request would make the node load it. llama-corral also reports its slots.

A model that is configured here and offered by a node is one model, served by both. Models that only
nodes have are listed after the local ones until the daemon stops, as failed while none of their
nodes is up; those that have a fallback are listed as failed also before any node had them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

import orjson

from proxy.adapter import MARK
from proxy.models import ModelInfo, ModelNames
from proxy.variant import SEPARATOR

NO_NODE: Final = "no node has it"
_MODELS_MAX: Final = 1024
_NAME_MAX_CHARACTERS: Final = 256
_SLOTS_MAX: Final = 1024
# Of `meta` in llama-server's list.
_META_NUMBERS: Final = ("vocab_type", "n_vocab", "n_ctx_train", "n_embd", "n_params", "size")


class Unreadable(Exception):
    """A response is not a list of models."""


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model that a node has loaded; None for what it does not report."""

    id: str
    aliases: tuple[str, ...] = ()
    slots: int | None = None
    context_length: int | None = None
    meta: Mapping[str, int | str] = field(default_factory=dict)
    variants: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OfferedModel:
    """A model of a node; `problem` is why the node cannot serve it now."""

    remote_model: RemoteModel
    slots: int
    node: str
    problem: str | None = None


def read_remote_models(body: bytes, only: Collection[str] = ()) -> tuple[RemoteModel, ...]:
    """The loaded models in a node's `/v1/models`; `only` these ids unless empty.

    Raises Unreadable if it is not a list of models, or has more than 1024.
    """
    entries = _entries(body)
    if len(entries) > _MODELS_MAX:
        raise Unreadable(f"its list of models has more than {_MODELS_MAX} entries")
    loaded = {entry["id"]: entry for entry in entries if _is_loaded(entry)}
    served = {model: entry for model, entry in loaded.items() if not only or model in only}
    bases = {model: _base_of(entry) for model, entry in served.items()}
    return tuple(
        _remote_model(entry, [one for one, base in bases.items() if base == model])
        for model, entry in served.items()
        if bases[model] not in served
    )


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


def _is_loaded(entry: object) -> bool:
    """Whether an entry is a model that is loaded, as far as the node reports that."""
    if not isinstance(entry, dict) or not _is_name(entry.get("id")):
        return False
    status = entry.get("status")
    return not isinstance(status, dict) or status.get("value", "loaded") == "loaded"


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


def merged(
    local: Sequence[ModelInfo],
    offered: Iterable[OfferedModel],
    created: int,
    fallback: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> list[ModelInfo]:
    """All models, local ones first; `created` (Unix time) and `fallback` are of those of nodes."""
    by_id: dict[str, list[OfferedModel]] = {}
    names = ModelNames(local)
    for one in offered:
        if model := served_id(one.remote_model, names):
            by_id.setdefault(model, []).append(one)
    ours = [_with_nodes(model_info, by_id.pop(model_info.id, [])) for model_info in local]
    remote = [_remote_only(model, found, created, fallback) for model, found in by_id.items()]
    known = ModelNames((*ours, *remote))
    gone = (
        _gone(name, created, others) for name, others in fallback.items() if not known.get(name)
    )
    return [*ours, *remote, *gone]


def _with_nodes(model_info: ModelInfo, offered: Sequence[OfferedModel]) -> ModelInfo:
    up = [one for one in offered if one.problem is None]
    if not up:
        return model_info
    return replace(
        model_info,
        state="loaded",
        reason=None,
        slots=model_info.slots + sum(one.slots for one in up),
        remote_variants=tuple(one for one in _variants(up) if one not in _own(model_info)),
        local_only=model_info,
    )


def _own(model_info: ModelInfo) -> set[str]:
    return {*model_info.variants, *(MARK + one.name for one in model_info.adapters)}


def _variants(offered: Iterable[OfferedModel]) -> list[str]:
    return sorted({variant for one in offered for variant in one.remote_model.variants})


def _remote_only(
    model: str,
    offered: Sequence[OfferedModel],
    created: int,
    fallback: Mapping[str, Sequence[str]],
) -> ModelInfo:
    up = [one for one in offered if one.problem is None]
    models = [one.remote_model for one in up or offered]
    lengths = [one.context_length for one in models if one.context_length]
    aliases = dict.fromkeys(alias for one in offered for alias in one.remote_model.aliases)
    others = next((fallback[name] for name in (model, *aliases) if name in fallback), ())
    return ModelInfo(
        id=model,
        aliases=tuple(aliases),
        state="loaded" if up else "failed",
        created=created,
        context_length=min(lengths, default=None),
        slots=sum(one.slots for one in up),
        reason=None if up else "; ".join(f"{one.node}: {one.problem}" for one in offered),
        remote_variants=tuple(_variants(offered)),
        is_local=False,
        meta=models[0].meta,
        fallback=tuple(others),
    )


def _gone(name: str, created: int, fallback: Sequence[str]) -> ModelInfo:
    """A model that no node has, and others answer for."""
    return ModelInfo(
        id=name,
        aliases=(),
        state="failed",
        created=created,
        context_length=None,
        slots=0,
        reason=NO_NODE,
        is_local=False,
        fallback=tuple(fallback),
    )
