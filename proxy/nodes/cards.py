"""The models here and those of nodes, as clients see them together. Pure.

A model that is configured here and offered by a node is one model, served by both. One that only
nodes offer is listed behind ours for as long as the daemon runs: while none of its nodes is up, as
failed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from proxy.loader import ModelCard
from proxy.nodes.offer import Offer
from proxy.roster import seek


@dataclass(frozen=True, slots=True)
class Offered:
    """A model of a node at one moment.

    Attributes:
        offer: The model.
        slots: Requests that the node gets at once for it.
        node: The node's name.
        trouble: Why it cannot answer now, or None: it can.
    """

    offer: Offer
    slots: int
    node: str
    trouble: str | None = None


def place_of(offer: Offer, here: Sequence[ModelCard]) -> str | None:
    """Return the id of the model that an offer serves here.

    Returns:
        That of one of ours which has one of its names; its own where none has; None where it would
        be a variant of ours, which ours is without it.
    """
    for name in (offer.id, *offer.aliases):
        if pick := seek(name, here):
            return None if pick.variant else pick.card.id
    return offer.id


def combined(here: Sequence[ModelCard], there: Iterable[Offered], created: int) -> list[ModelCard]:
    """Return all models as clients see them, ours first.

    Args:
        here: Those that are configured here.
        there: Those of all nodes.
        created: Unix time in whole seconds, for those that only nodes have.
    """
    places: dict[str, list[Offered]] = {}
    for offered in there:
        if place := place_of(offered.offer, here):
            places.setdefault(place, []).append(offered)
    ours = [_joined(card, places.pop(card.id, [])) for card in here]
    return [*ours, *(_remote(place, found, created) for place, found in places.items())]


def local(cards: Iterable[ModelCard]) -> list[ModelCard]:
    """Return models as they are without any other machine."""
    return [card.here or card for card in cards if card.is_here]


def _joined(card: ModelCard, there: Sequence[Offered]) -> ModelCard:
    up = [offered for offered in there if offered.trouble is None]
    if not up:
        return card
    slots = card.slots + sum(offered.slots for offered in up)
    return replace(card, state="loaded", reason=None, slots=slots, here=card)


def _remote(name: str, there: Sequence[Offered], created: int) -> ModelCard:
    up = [offered for offered in there if offered.trouble is None]
    lengths = [one.offer.context_length for one in up or there if one.offer.context_length]
    troubles = "; ".join(f"{one.node}: {one.trouble}" for one in there)
    return ModelCard(
        id=name,
        aliases=tuple(dict.fromkeys(alias for one in there for alias in one.offer.aliases)),
        state="loaded" if up else "failed",
        created=created,
        context_length=min(lengths, default=None),
        slots=sum(one.slots for one in up),
        reason=None if up else troubles,
        is_here=False,
    )
