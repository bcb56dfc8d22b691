"""Which model a name means, and every name there is. Pure.

A model is known by its id and its aliases, and each of its variants by any of those with the
variant behind it: `chat:high`. A model of exactly that name goes before a variant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from proxy.errors import BadRequest, UnknownModel, known_models
from proxy.models import ModelInfo
from proxy.variant import SEPARATOR, Variant


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """What a name means.

    Attributes:
        model_info: The model.
        variant: What is made of a request for it, or None: nothing.
    """

    model_info: ModelInfo
    variant: Variant | None = None


def resolve(name: str | None, model_infos: Sequence[ModelInfo]) -> ResolvedModel:
    """Return what a client means; if there is only one model, no name means that one.

    Raises:
        BadRequest: No name was given, and there is a choice.
        UnknownModel: Nothing has that name.
    """
    if not name:
        if len(model_infos) == 1:
            return ResolvedModel(model_infos[0])
        raise BadRequest(f"the request names no model ({known_models(_ids(model_infos))})")
    if pick := lookup(name, model_infos):
        return pick
    raise UnknownModel(name, _ids(model_infos))


def lookup(name: str, model_infos: Sequence[ModelInfo]) -> ResolvedModel | None:
    """Return what a name means, or None where nothing has it."""
    if model_info := _named(name, model_infos):
        return ResolvedModel(model_info)
    base, _, variant = name.rpartition(SEPARATOR)
    model_info = _named(base, model_infos)
    if model_info and variant in model_info.variants:
        return ResolvedModel(model_info, model_info.variants[variant])
    return None


def with_variants(model_infos: Sequence[ModelInfo]) -> list[ModelInfo]:
    """Return these models and, behind each, its variants as models of their own."""
    return [entry for model_info in model_infos for entry in (model_info, *_variants(model_info))]


def _variants(model_info: ModelInfo) -> Iterator[ModelInfo]:
    for variant in model_info.variants:
        end = SEPARATOR + variant
        aliases = tuple(alias + end for alias in model_info.aliases)
        yield replace(model_info, id=model_info.id + end, aliases=aliases, variants={})


def _named(name: str, model_infos: Sequence[ModelInfo]) -> ModelInfo | None:
    return next(
        (
            model_info
            for model_info in model_infos
            if name == model_info.id or name in model_info.aliases
        ),
        None,
    )


def _ids(model_infos: Sequence[ModelInfo]) -> list[str]:
    return [entry.id for entry in with_variants(model_infos)]
