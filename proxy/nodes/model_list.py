"""Reads nodes' models from their `/v1/models`, and merges them with the local models. Pure.

Every server with OpenAI's API has that endpoint; only the id of a model is common to all. A
llama-corral and a llama-server in router mode report whether a model is loaded. A model that is not
loaded is ignored, because a request would make the node load it; except if the node agrees to that
and its settings here allow it. llama-corral also reports its slots.

A model that is configured here and offered by a node is one model, served by both. Models that only
nodes have are listed after the local ones until the daemon stops; they are failed while none of
their nodes is up. Models with a fallback are listed as failed even before any node had them, and
those whose machines are started on demand as unloaded.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final, Literal

import orjson

from proxy.request.models import ModelInfo, ModelNames
from proxy.request.variants import MARK, SEPARATOR

# More than any machine serves. All names of all nodes are merged whenever one changes.
_MODELS_MAX: Final = 512
_NAMES_MAX: Final = 2048
_NAME_MAX_CHARACTERS: Final = 256
_SLOTS_MAX: Final = 1024
_CHOOSE: Final = "choose some with `models` in its table of the settings"
# Members of `meta` in llama-server's list.
_META_NUMBERS: Final = ("vocab_type", "n_vocab", "n_ctx_train", "n_embd", "n_params", "size")


RemoteState = Literal["loaded", "loading", "unloaded"]
_LOADED: Final = frozenset({"loaded"})
_LOADABLE: Final = frozenset({"loaded", "loading", "unloaded"})


class Unreadable(Exception):
    """A response is not a list of models."""


@dataclass(frozen=True, slots=True)
class RemoteModel:
    """A model of a node; None for values that the node does not report."""

    id: str
    aliases: tuple[str, ...] = ()
    slots: int | None = None
    context_length: int | None = None
    meta: Mapping[str, int | str] = field(default_factory=dict)
    variants: tuple[str, ...] = ()
    state: RemoteState = "loaded"  # If it is `unloaded`, the node agrees to load it.

    @property
    def is_loaded(self) -> bool:
        return self.state == "loaded"


@dataclass(frozen=True, slots=True)
class OfferedModel:
    """A model of a node; `problem` says why the node can neither serve nor load it now."""

    remote_model: RemoteModel
    slots: int
    node: str
    problem: str | None = None


def read_remote_models(
    body: bytes, only: Collection[str] = (), *, with_loadable: bool = False
) -> tuple[RemoteModel, ...]:
    """Read the loaded models in a node's `/v1/models`; `with_loadable`, also those it would load.

    Only models with an id in `only` count, unless that is empty.

    Raises Unreadable if it is not a list of models, or has more than 512 models or 2048 names.
    """
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise Unreadable(f"its list of models is not JSON: {error}") from error
    entries = content.get("data") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise Unreadable("it has no list of models; check its url")
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
    return (1 + len(remote_model.aliases)) * (1 + len(remote_model.variants))


def count_slots(body: bytes) -> int | None:
    """Return the number of slots in a node's `/slots`; None if it is no list of slots."""
    try:
        slots = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return len(slots) if isinstance(slots, list) and 1 <= len(slots) <= _SLOTS_MAX else None


def _state(entry: object) -> RemoteState | None:
    """Return the state of a model, `loaded` if not reported; None: it is unusable."""
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
    aliases = entry.get("aliases")
    aliases = aliases if isinstance(aliases, list) else ()
    return RemoteModel(
        id=entry["id"],
        aliases=tuple(alias for alias in aliases if _is_name(alias) and alias != entry["id"]),
        slots=min(slots, _SLOTS_MAX) if slots else None,
        context_length=_positive(entry.get("context_length")) or _positive(members.get("n_ctx")),
        meta=_meta(members),
        variants=tuple(
            sorted(name.removeprefix(entry["id"]).removeprefix(SEPARATOR) for name in variants)
        ),
        state=_state(entry) or "loaded",
    )


def _base_of(entry: Mapping[str, Any]) -> str | None:
    """Return the model of a variant's entry, by llama-corral's own member."""
    base = entry.get("variant_of")
    if isinstance(base, str) and entry["id"].startswith((base + SEPARATOR, base + MARK)):
        return base
    return None


def _meta(members: Mapping[str, Any]) -> dict[str, int | str]:
    numbers = {name: _positive(members.get(name)) for name in _META_NUMBERS}
    meta: dict[str, int | str] = {name: number for name, number in numbers.items() if number}
    return meta | ({"ftype": members["ftype"]} if _is_name(members.get("ftype")) else {})


def _is_name(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= _NAME_MAX_CHARACTERS and name.isprintable()


def _positive(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def served_id(remote_model: RemoteModel, local: ModelNames) -> str | None:
    """Return the id under which a node's model is served here.

    It is the id of the local model with one of its names, otherwise its own id. None: its name is a
    variant of a local model, which only the local model serves.
    """
    for name in (remote_model.id, *remote_model.aliases):
        if found := local.get(name):
            return None if found.variant or found.adapter else found.model_info.id
    return remote_model.id


NO_NODE: Final = "no node has it"
_BEST_FIRST: Final[Sequence[RemoteState]] = ("loaded", "loading", "unloaded")


@dataclass(frozen=True, slots=True, eq=False)
class RemoteModels:
    """The models of nodes, merged."""

    local: ModelNames  # The local names with which they were merged.
    # Offers of local models, by id.
    by_local_id: Mapping[str, Sequence[OfferedModel]] = field(default_factory=dict)
    # Models that are not local, including those that only have a fallback.
    others: tuple[ModelInfo, ...] = ()


def remote_models(
    local: ModelNames,
    offered: Iterable[OfferedModel],
    created: int,
    fallback: Mapping[str, Sequence[str]] = MappingProxyType({}),
    on_demand: Collection[str] = (),
) -> RemoteModels:
    """Group nodes' offers by model.

    `created` (Unix time) and `fallback` are for nodes' models. For those in `on_demand`, machines
    are started when they are requested.
    """
    by_id: dict[str, list[OfferedModel]] = {}
    for offer in offered:
        if model := served_id(offer.remote_model, local):
            by_id.setdefault(model, []).append(offer)
    own = {model_info.id for model_info in local.model_infos}
    by_local_id = {model: by_id.pop(model) for model in own & by_id.keys()}
    others = [_remote_only(model, found, created, fallback) for model, found in by_id.items()]
    if listed := dict.fromkeys((*on_demand, *fallback)):
        known = ModelNames((*local.model_infos, *others))
        others += [  # models that no node has yet, or for which others answer
            _remote_only(name, (), created, fallback) for name in listed if not known.get(name)
        ]
    others = [
        replace(model_info, state="unloaded", reason=None)
        if model_info.state == "failed" and model_info.id in on_demand
        else model_info
        for model_info in others
    ]
    return RemoteModels(local, by_local_id, tuple(others))


def merge_models(local: Iterable[ModelInfo], remote: RemoteModels) -> list[ModelInfo]:
    """Return all models, local ones first."""
    offers = remote.by_local_id
    return [*(_with_nodes(info, offers.get(info.id, ())) for info in local), *remote.others]


def _with_nodes(model_info: ModelInfo, offered: Sequence[OfferedModel]) -> ModelInfo:
    up = [model for model in offered if model.problem is None and model.remote_model.is_loaded]
    if not up:
        return model_info
    own = {*model_info.variants, *(MARK + adapter.name for adapter in model_info.adapters)}
    return replace(
        model_info,
        state="loaded",
        reason=None,
        slots=model_info.slots + sum(model.slots for model in up),
        remote_variants=tuple(variant for variant in _variants(up) if variant not in own),
        local_only=model_info,
    )


def _variants(offered: Iterable[OfferedModel]) -> list[str]:
    return sorted({variant for model in offered for variant in model.remote_model.variants})


def _remote_only(
    model: str, offered: Sequence[OfferedModel], created: int, fallback: Mapping[str, Sequence[str]]
) -> ModelInfo:
    up = [model for model in offered if model.problem is None and model.remote_model.is_loaded]
    states = {model.remote_model.state for model in offered if model.problem is None}
    state: RemoteState | Literal["failed"] = next(
        (state for state in _BEST_FIRST if state in states), "failed"
    )
    models = [model.remote_model for model in up or offered]
    lengths = [model.context_length for model in models if model.context_length]
    aliases = dict.fromkeys(alias for model in offered for alias in model.remote_model.aliases)
    problems = "; ".join(f"{model.node}: {model.problem}" for model in offered)
    others = next((fallback[name] for name in (model, *aliases) if name in fallback), ())
    return ModelInfo(
        id=model,
        aliases=tuple(aliases),
        state=state,
        created=created,
        context_length=min(lengths, default=None),
        slots=sum(model.slots for model in up),
        reason=problems or NO_NODE if state == "failed" else None,
        remote_variants=tuple(_variants(offered)),
        is_local=False,
        meta=models[0].meta if models else {},
        fallback=tuple(others),
    )
