"""One way to run a model: what differs from its profile."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from supervisor.engines.help import FlagValue


@dataclass(frozen=True, slots=True)
class Variant:
    """Flags beside those of the profile.

    Attributes:
        axes: What it varies, such as `threads`; variants of one axis exclude each other.
        flags: By today's names, in the order to show them.
        replicas: Instances that serve the model; None for as many as it has.
        parts: Of how many variants it is the combination.
    """

    axes: frozenset[str] = frozenset()
    flags: tuple[tuple[str, FlagValue], ...] = ()
    replicas: int | None = None
    parts: int = 1

    @property
    def name(self) -> str:
        words = [f"{key} {_word(value)}" for key, value in self.flags]
        words += [f"{self.replicas} instances"] if self.replicas else []
        return ", ".join(words) or "base"


BASE = Variant()


def combined(variants: Iterable[Variant]) -> Variant | None:
    """All changes of some variants together; None if two of them change the same."""
    axes: frozenset[str] = frozenset()
    flags: dict[str, FlagValue] = {}
    replicas: int | None = None
    parts = 0
    for one in variants:
        if axes & one.axes or flags.keys() & dict(one.flags).keys():
            return None
        axes |= one.axes
        flags.update(one.flags)
        replicas = one.replicas or replicas
        parts += one.parts
    return Variant(axes, tuple(flags.items()), replicas, parts)


def _word(value: FlagValue) -> str:
    return ("on" if value else "off") if isinstance(value, bool) else str(value)
