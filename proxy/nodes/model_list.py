"""The models of nodes, read from their `/v1/models`, in one list with the local ones. Pure.

Every server with OpenAI's API has that endpoint; beyond a model's id they differ. Another
llama-corral and a llama-server in router mode report whether a model is loaded; one that is not is
ignored, because a request would make the node load it, unless the node agrees to that and is to be
asked. llama-corral also reports its slots.

A model that is configured here and offered by a node is one model, served by both. Models that only
nodes have are listed after the local ones until the daemon stops, as failed while none of their
nodes is up; those that have a fallback are listed as failed also before any node had them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Literal

import orjson

from proxy.request.models import ModelInfo, ModelNames
from proxy.request.variants import MARK, SEPARATOR

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
        variants=tuple(sorted(_variant_name(variant, entry["id"]) for variant in variants)),
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


NO_NODE: Final = "no node has it"
_BEST_FIRST: Final[Sequence[RemoteState]] = ("loaded", "loading", "unloaded")


@dataclass(frozen=True, slots=True, eq=False)
class RemoteModels:
    """What nodes offer, by the id under which it is served here.

    Attributes:
        local: The local names that it was built with.
        by_local_id: What is offered of local models.
        others: The models that are not local, and those that only have a fallback.
    """

    local: ModelNames
    by_local_id: Mapping[str, Sequence[OfferedModel]] = field(default_factory=dict)
    others: tuple[ModelInfo, ...] = ()


def remote_models(
    local: ModelNames,
    offered: Iterable[OfferedModel],
    created: int,
    fallback: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> RemoteModels:
    """Group what nodes offer; `created` (Unix time) and `fallback` are of models of nodes."""
    by_id: dict[str, list[OfferedModel]] = {}
    for offer in offered:
        if model := served_id(offer.remote_model, local):
            by_id.setdefault(model, []).append(offer)
    own = {model_info.id for model_info in local.model_infos}
    by_local_id = {model: by_id.pop(model) for model in own & by_id.keys()}
    others = [_remote_only(model, found, created, fallback) for model, found in by_id.items()]
    if fallback:
        known = ModelNames((*local.model_infos, *others))
        others += [
            _absent_model(name, created, names)
            for name, names in fallback.items()
            if not known.get(name)
        ]
    return RemoteModels(local, by_local_id, tuple(others))


def merge_models(local: Iterable[ModelInfo], remote: RemoteModels) -> list[ModelInfo]:
    """All models, local ones first."""
    offers = remote.by_local_id
    return [*(_with_nodes(info, offers.get(info.id, ())) for info in local), *remote.others]


def _with_nodes(model_info: ModelInfo, offered: Sequence[OfferedModel]) -> ModelInfo:
    up = [model for model in offered if model.problem is None and model.remote_model.is_loaded]
    if not up:
        return model_info
    return replace(
        model_info,
        state="loaded",
        reason=None,
        slots=model_info.slots + sum(model.slots for model in up),
        remote_variants=tuple(
            variant for variant in _variants(up) if variant not in _own_variant_names(model_info)
        ),
        local_only=model_info,
    )


def _own_variant_names(model_info: ModelInfo) -> set[str]:
    return {*model_info.variants, *(MARK + adapter.name for adapter in model_info.adapters)}


def _variants(offered: Iterable[OfferedModel]) -> list[str]:
    return sorted({variant for model in offered for variant in model.remote_model.variants})


def _remote_only(
    model: str,
    offered: Sequence[OfferedModel],
    created: int,
    fallback: Mapping[str, Sequence[str]],
) -> ModelInfo:
    up = [model for model in offered if model.problem is None and model.remote_model.is_loaded]
    state = _state_of([model.remote_model.state for model in offered if model.problem is None])
    models = [model.remote_model for model in up or offered]
    lengths = [model.context_length for model in models if model.context_length]
    aliases = dict.fromkeys(alias for model in offered for alias in model.remote_model.aliases)
    others = next((fallback[name] for name in (model, *aliases) if name in fallback), ())
    return ModelInfo(
        id=model,
        aliases=tuple(aliases),
        state=state,
        created=created,
        context_length=min(lengths, default=None),
        slots=sum(model.slots for model in up),
        reason=_reason(offered) if state == "failed" else None,
        remote_variants=tuple(_variants(offered)),
        is_local=False,
        meta=models[0].meta,
        fallback=tuple(others),
    )


def _state_of(up: Sequence[RemoteState]) -> RemoteState | Literal["failed"]:
    """The state of a model that these nodes have."""
    return next((state for state in _BEST_FIRST if state in up), "failed")


def _reason(offered: Iterable[OfferedModel]) -> str:
    return "; ".join(f"{model.node}: {model.problem}" for model in offered)


def _absent_model(name: str, created: int, fallback: Sequence[str]) -> ModelInfo:
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
