"""The models here and those of nodes, as clients see them together. Pure.

A model that is configured here and offered by a node is one model, served by both. One that only
nodes offer is listed behind ours for as long as the daemon runs: while none of its nodes is up, as
failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from proxy.models import ModelInfo
from proxy.nodes.model_list import RemoteModel
from proxy.resolve import lookup


@dataclass(frozen=True, slots=True)
class OfferedModel:
    """A model of a node at one moment.

    Attributes:
        remote_model: The model.
        slots: Requests that the node gets at once for it.
        node: The node's name.
        problem: Why it cannot answer now, or None: it can.
    """

    remote_model: RemoteModel
    slots: int
    node: str
    problem: str | None = None


def place_of(remote_model: RemoteModel, here: Sequence[ModelInfo]) -> str | None:
    """Return the id of the model that an offer serves here.

    Returns:
        That of one of ours which has one of its names; its own where none has; None where it would
        be a variant of ours, which ours is without it.
    """
    for name in (remote_model.id, *remote_model.aliases):
        if pick := lookup(name, here):
            return None if pick.variant else pick.model_info.id
    return remote_model.id


def merged(
    here: Sequence[ModelInfo], there: Iterable[OfferedModel], created: int
) -> list[ModelInfo]:
    """Return all models as clients see them, ours first.

    Args:
        here: Those that are configured here.
        there: Those of all nodes.
        created: Unix time in whole seconds, for those that only nodes have.
    """
    places: dict[str, list[OfferedModel]] = {}
    for offered in there:
        if place := place_of(offered.remote_model, here):
            places.setdefault(place, []).append(offered)
    ours = [_joined(model_info, places.pop(model_info.id, [])) for model_info in here]
    return [*ours, *(_remote(place, found, created) for place, found in places.items())]


def local(model_infos: Iterable[ModelInfo]) -> list[ModelInfo]:
    """Return models as they are without any other machine."""
    return [
        model_info.local_only or model_info for model_info in model_infos if model_info.is_local
    ]


def _joined(model_info: ModelInfo, there: Sequence[OfferedModel]) -> ModelInfo:
    up = [offered for offered in there if offered.problem is None]
    if not up:
        return model_info
    slots = model_info.slots + sum(offered.slots for offered in up)
    return replace(model_info, state="loaded", reason=None, slots=slots, local_only=model_info)


def _remote(name: str, there: Sequence[OfferedModel], created: int) -> ModelInfo:
    up = [offered for offered in there if offered.problem is None]
    lengths = [
        one.remote_model.context_length for one in up or there if one.remote_model.context_length
    ]
    troubles = "; ".join(f"{one.node}: {one.problem}" for one in there)
    return ModelInfo(
        id=name,
        aliases=tuple(dict.fromkeys(alias for one in there for alias in one.remote_model.aliases)),
        state="loaded" if up else "failed",
        created=created,
        context_length=min(lengths, default=None),
        slots=sum(one.slots for one in up),
        reason=None if up else troubles,
        is_local=False,
    )
