"""What a request for a model that is not loaded would cause. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from supervisor.admission.decide import Actions
from supervisor.admission.model_state import ModelState


@dataclass(frozen=True, slots=True)
class Eviction:
    """Room for a model.

    Attributes:
        models: Those that would be unloaded for it.
        wait_s: How long it waits before that at least.
        refusal: Why it would not be loaded; None: it would.
    """

    models: tuple[str, ...] = ()
    wait_s: float = 0.0
    refusal: str | None = None


def eviction(
    name: str,
    models: Sequence[ModelState],
    decide: Callable[[Sequence[ModelState]], Actions],
    patience_s: float,
) -> Eviction:
    """Return what would be unloaded for a model if a request came now.

    Args:
        name: The model.
        models: All of them.
        decide: Decides what is to be done.
        patience_s: How long a request waits for memory before working models are unloaded.
    """
    now = _of(name, decide(_requested(name, models, 0.0)), models, 0.0)
    if now is not None:
        return now
    later = decide(_requested(name, models, patience_s))
    return _of(name, later, models, patience_s) or Eviction(wait_s=patience_s)


def _requested(name: str, models: Sequence[ModelState], waited_s: float) -> list[ModelState]:
    return [
        replace(
            one,
            waiting=max(1, one.waiting),
            oldest_wait_s=max(waited_s, one.oldest_wait_s),
        )
        if one.name == name
        else one
        for one in models
    ]


def _of(
    name: str, actions: Actions, models: Sequence[ModelState], waited_s: float
) -> Eviction | None:
    """Return None where nothing would be done yet."""
    if name in actions.load:
        return Eviction()
    if name in actions.refuse:
        return Eviction(refusal=actions.refuse[name])
    expired = {one.name for one in models if one.unload_in_s <= 0}
    found = dict.fromkeys((*actions.unload, *actions.pause))
    victims = tuple(one for one in found if one not in expired and one != name)
    return Eviction(victims, waited_s) if victims else None
