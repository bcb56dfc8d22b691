"""What other machines say that their caches hold: a belief, weaker than our own records.

It expires, and the oldest goes first. A decision looks up each turn of its prompt once, however
many machines there are and whatever they say; of those that hold the same prefix the latest few
count.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from proxy.prompt_cache.prefix_digest import EXPIRES_S
from proxy.prompt_cache.prompt import Prompt

_HOLDERS_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class RemoteHint:
    """What other machines are believed to hold of one prompt.

    Attributes:
        tokens: Of the prompt, by instance.
        owner: The instance that has most of its conversation, or None.
        turn: The place of that in the turn hashes of the prompt.
    """

    tokens: Mapping[str, int] = field(default_factory=dict)
    owner: str | None = None
    turn: int = 0


NO_REMOTE_HINT: Final = RemoteHint()


class RemotePrefixes:
    """At most `hashes_max` turn hashes, each with the instances that hold it."""

    def __init__(self, hashes_max: int) -> None:
        self._hashes_max = hashes_max
        # By instance, when the belief expires; the latest last, in both dictionaries.
        self._holders: OrderedDict[int, dict[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, instance: str, turn_hashes: Iterable[int], now_s: float) -> None:
        """Note that an instance says that it holds these, the oldest first."""
        for turn_hash in turn_hashes:
            holders = self._holders.setdefault(turn_hash, {})
            holders.pop(instance, None)
            holders[instance] = now_s + EXPIRES_S
            if len(holders) > _HOLDERS_MAX:
                del holders[next(iter(holders))]
            self._holders.move_to_end(turn_hash)
        while len(self._holders) > self._hashes_max:
            self._holders.popitem(last=False)

    def forget(self, instance: str) -> None:
        """Note that nothing is known any more of what an instance holds."""
        for turn_hash in [one for one, held in self._holders.items() if instance in held]:
            holders = self._holders[turn_hash]
            del holders[instance]
            if not holders:
                del self._holders[turn_hash]

    def find(self, prompt: Prompt, now_s: float) -> RemoteHint:
        """Return what is believed of a prompt; the instances may be those of other models."""
        if not self._holders:
            return NO_REMOTE_HINT
        turns: dict[str, int] = {}
        owner, owners_turn, told = None, 0, tuple(map(prompt.told, prompt.turn_hashes))
        for turn in reversed(range(len(prompt.turn_hashes))):
            holders = self._holders.get(told[turn])
            for instance, expires_at_s in reversed(holders.items()) if holders else ():
                if instance not in turns and expires_at_s > now_s:
                    turns[instance] = turn
                    if owner is None and turn >= prompt.first_own:
                        owner, owners_turn = instance, turn
        tokens = {turn: prompt.tokens_until(turn) for turn in set(turns.values())}
        return RemoteHint({one: tokens[turn] for one, turn in turns.items()}, owner, owners_turn)
