"""Which model a name means, and every name there is. Pure.

A model is known by its id and its aliases, and each of its variants by any of those with the
variant behind it: `chat:high`. A model of exactly that name goes before a variant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from proxy.carry.variant import SEPARATOR, Variant
from proxy.errors import BadRequest, UnknownModel, known_models
from proxy.loader import ModelCard


@dataclass(frozen=True, slots=True)
class Pick:
    """What a name means.

    Attributes:
        card: The model.
        variant: What is made of a request for it, or None: nothing.
    """

    card: ModelCard
    variant: Variant | None = None


def find(name: str | None, cards: Sequence[ModelCard]) -> Pick:
    """Return what a client means; if there is only one model, no name means that one.

    Raises:
        BadRequest: No name was given, and there is a choice.
        UnknownModel: Nothing has that name.
    """
    if not name:
        if len(cards) == 1:
            return Pick(cards[0])
        raise BadRequest(f"the request names no model ({known_models(_ids(cards))})")
    if pick := seek(name, cards):
        return pick
    raise UnknownModel(name, _ids(cards))


def seek(name: str, cards: Sequence[ModelCard]) -> Pick | None:
    """Return what a name means, or None where nothing has it."""
    if card := _named(name, cards):
        return Pick(card)
    base, _, variant = name.rpartition(SEPARATOR)
    card = _named(base, cards)
    if card and variant in card.variants:
        return Pick(card, card.variants[variant])
    return None


def listed(cards: Sequence[ModelCard]) -> list[ModelCard]:
    """Return these models and, behind each, its variants as models of their own."""
    return [entry for card in cards for entry in (card, *_variants(card))]


def _variants(card: ModelCard) -> Iterator[ModelCard]:
    for variant in card.variants:
        end = SEPARATOR + variant
        aliases = tuple(alias + end for alias in card.aliases)
        yield replace(card, id=card.id + end, aliases=aliases, variants={})


def _named(name: str, cards: Sequence[ModelCard]) -> ModelCard | None:
    return next((card for card in cards if name == card.id or name in card.aliases), None)


def _ids(cards: Sequence[ModelCard]) -> list[str]:
    return [entry.id for entry in listed(cards)]
