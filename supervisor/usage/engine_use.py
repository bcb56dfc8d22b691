"""What one engine process was used for, and what it counted beside. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import astuple, dataclass, field
from itertools import count

from proxy.router.slot_use import SlotUse, Tokens
from supervisor.usage.cpu_shares import CpuShares
from supervisor.usage.usage import OWN_WORK

_TURN = count(1)


@dataclass(slots=True)
class EngineUse:
    """One process.

    Attributes:
        attributed: Tokens that have an account.
        untold: Slot seconds of requests whose tokens are not all attributed, by key.
        cut_off: Those of all that were cut off.
        turn: Changes whenever a request begins.
        is_due: Whether it may have counted tokens that have none.
    """

    pid: int | None
    model: str
    shares: CpuShares = field(default_factory=CpuShares)
    attributed: Tokens = field(default_factory=Tokens)
    untold: dict[str, float] = field(default_factory=dict)
    cut_off: dict[str, float] = field(default_factory=dict)
    turn: int = 0
    is_due: bool = True

    @property
    def is_idle(self) -> bool:
        return self.shares.is_idle

    def begin(self, lease: Hashable, slots: int, now_s: float) -> None:
        self.turn = next(_TURN)
        self.shares.begin(lease, slots, now_s)

    def end(self, lease: Hashable, key: str, use: SlotUse) -> float:
        """Attribute tokens to a request of a key; return its processor time."""
        self.attributed += use.tokens
        self.is_due = True
        if not use.is_exact:
            self.untold[key] = self.untold.get(key, 0.0) + use.slot_s
        if use.is_cut_off:
            self.cut_off[key] = self.cut_off.get(key, 0.0) + use.slot_s
        return self.shares.end(lease)

    def take_rest(self, counted: Tokens) -> tuple[list[tuple[str, Tokens]], float]:
        """Attribute what the engine counted beyond that; return it, and seconds of no request.

        It is that of requests whose tokens the engine did not tell, by the time that they held
        slots; where there are none, it is the supervisor's own. What it did not count is taken
        from those that were cut off.
        """
        missing, surplus = _beyond(counted, self.attributed), _beyond(self.attributed, counted)
        parts = [*shared(missing, self.untold or {OWN_WORK: 1.0}).items()]
        self.attributed += missing
        if surplus.total and self.cut_off:
            found = shared(surplus, self.cut_off).items()
            parts += [(key, Tokens() - tokens) for key, tokens in found]
            self.attributed -= surplus
        self.untold, self.cut_off, self.is_due = {}, {}, False
        own_s, self.shares.own_s = self.shares.own_s, 0.0
        return parts, own_s


def _beyond(one: Tokens, other: Tokens) -> Tokens:
    return Tokens(*(max(0, figure) for figure in astuple(one - other)))


def shared(tokens: Tokens, weights: Mapping[str, float]) -> Mapping[str, Tokens]:
    """Share tokens out by weights, none lost; equally where all are 0."""
    parts: dict[str, Tokens] = {}
    left, weight_left = tokens, sum(weights.values())
    for done, (key, weight) in enumerate(weights.items()):
        share = weight / weight_left if weight_left else 1 / (len(weights) - done)
        part = Tokens(*(round(one * min(1.0, share)) for one in astuple(left)))
        parts[key], left = part, left - part
        weight_left -= weight
    return parts
