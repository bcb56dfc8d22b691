"""The models of nodes and the local ones in one list. Pure.

A model that is configured here and offered by a node is one model, served by both. Models that only
nodes have are listed after the local ones until the daemon stops, as failed while none of their
nodes is up; those that have a fallback are listed as failed also before any node had them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, Literal

from proxy.adapter import MARK
from proxy.models import ModelInfo, ModelNames
from proxy.nodes.model_list import OfferedModel, RemoteState, served_id

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
            _gone(name, created, names) for name, names in fallback.items() if not known.get(name)
        ]
    return RemoteModels(local, by_local_id, tuple(others))


def merged(local: Iterable[ModelInfo], remote: RemoteModels) -> list[ModelInfo]:
    """All models, local ones first."""
    offers = remote.by_local_id
    return [*(_with_nodes(info, offers.get(info.id, ())) for info in local), *remote.others]


def _with_nodes(model_info: ModelInfo, offered: Sequence[OfferedModel]) -> ModelInfo:
    up = [one for one in offered if one.problem is None and one.remote_model.is_loaded]
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
    up = [one for one in offered if one.problem is None and one.remote_model.is_loaded]
    state = _state_of([one.remote_model.state for one in offered if one.problem is None])
    models = [one.remote_model for one in up or offered]
    lengths = [one.context_length for one in models if one.context_length]
    aliases = dict.fromkeys(alias for one in offered for alias in one.remote_model.aliases)
    others = next((fallback[name] for name in (model, *aliases) if name in fallback), ())
    return ModelInfo(
        id=model,
        aliases=tuple(aliases),
        state=state,
        created=created,
        context_length=min(lengths, default=None),
        slots=sum(one.slots for one in up),
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
    return "; ".join(f"{one.node}: {one.problem}" for one in offered)


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
