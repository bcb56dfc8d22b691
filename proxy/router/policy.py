"""Which instance takes a request: the rule of every policy, over facts. Pure.

`affinity`, the default:

1. A conversation goes to its owner, if that holds more than a few of its tokens. It leaves only if
   the owner has no slot free, another has, and waiting takes longer than the answer elsewhere: a
   quarter longer, plus the time in which the owner's cache was filled. It waits no longer than that
   either, so a wrong estimate costs twice the move at most.
2. A new conversation goes, among the instances that own less than 1.25 times their share and one
   more (the first few would otherwise separate what belongs together), where most of its prompt is
   cached, then to the one that owns the fewest, then to the least busy.

An instance on trial is for some conversations, the others are for the rest (`on_trial`); each
conversation stays on its side. Only a request that would find no slot there goes to the other side.

`least-busy` takes the instance with the fewest requests for each slot, `round-robin` the one used
longest ago. A spare instance, as one on another machine mostly is, takes only requests that find no
free slot elsewhere; a conversation that it owns stays there. No request goes to an instance without
a free slot. Source: Mirrokni, Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads",
2016.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from proxy.settings import Policy

_SHARE: Final = 1.25
_SOONER: Final = 1.25
# Fewer tokens than this are computed as quickly as found.
_WORTH_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class Candidate:
    """An instance as one request sees it.

    Attributes:
        last_used: In a count of its own; 0 for never.
        conversations: Latest conversations that it owns.
        cached_tokens: Tokens of this prompt that its cache is believed to hold.
        backlog_tokens: Prompt tokens that it still has to compute.
        free_in_s: Estimated seconds until a slot is free; 0 where one is.
        is_spare: Takes only requests that find no free slot elsewhere.
        needed: Slots that the request would use.
        is_on_trial: Runs the profile on trial.
    """

    name: str
    slots: int
    slots_in_use: int = 0
    last_used: int = 0
    conversations: int = 0
    cached_tokens: int = 0
    backlog_tokens: int = 0
    prefill_tps: float = 500.0
    free_in_s: float = 0.0
    is_spare: bool = False
    needed: int = 1
    is_on_trial: bool = False

    @property
    def is_free(self) -> bool:
        return self.slots_in_use + self.needed <= self.slots

    @property
    def load(self) -> float:
        return self.slots_in_use / self.slots

    @property
    def has_useful_cache(self) -> bool:
        return self.cached_tokens >= _WORTH_TOKENS

    def answers_in_s(self, tokens: int) -> float:
        """Return when a prompt of so many tokens would be computed, with a slot free now."""
        new_tokens = max(0, tokens - self.cached_tokens)
        return (self.backlog_tokens + new_tokens) / self.prefill_tps


@dataclass(frozen=True, slots=True)
class Choice:
    """What a request does now.

    Attributes:
        name: The instance whose slot it takes, or None: it waits.
        moves_in_s: Seconds after which it would leave the owner for a slot that is free elsewhere;
            None where no slot is free.
        is_diverted: Whether its side of a trial had no slot for it.
    """

    name: str | None
    moves_in_s: float | None = None
    is_diverted: bool = False


def choose(
    policy: Policy,
    candidates: Sequence[Candidate],
    tokens: int,
    owner: str | None,
    waited_s: float,
    *,
    on_trial: bool = False,
) -> Choice:
    """Choose the instance for one request.

    Args:
        policy: The rule.
        candidates: The instances that may take it.
        tokens: Length of the prompt.
        owner: The instance that has its conversation, or None; only `affinity` uses it.
        waited_s: How long the request has waited already.
        on_trial: Whether its conversation is part of the trial, where there is one.
    """
    free = [one for one in candidates if one.is_free]
    if not free:
        return Choice(None)
    free = [one for one in free if one.is_on_trial == on_trial] or free
    first = [one for one in free if not one.is_spare] or free
    if policy == "round-robin":
        return Choice(min(first, key=lambda one: one.last_used).name)
    if policy == "least-busy":
        return Choice(min(first, key=lambda one: (one.load, one.last_used)).name)
    owning = next((one for one in candidates if one.name == owner and one.has_useful_cache), None)
    if owning is None:
        peers = [one for one in candidates if _are_peers(one, first[0])]
        return Choice(_for_new_conversation(first, peers).name)
    if owning.is_free:
        return Choice(owning.name)
    return _move_or_wait(owning, free, tokens, waited_s)


def _are_peers(one: Candidate, other: Candidate) -> bool:
    return one.is_spare == other.is_spare and one.is_on_trial == other.is_on_trial


def _for_new_conversation(free: Sequence[Candidate], everyone: Sequence[Candidate]) -> Candidate:
    share = sum(one.conversations for one in everyone) / len(everyone)
    below = [one for one in free if one.conversations < _SHARE * share + 1]
    return min(
        below or free,
        key=lambda one: (
            -(one.cached_tokens // _WORTH_TOKENS),
            one.conversations,
            one.load,
            one.last_used,
        ),
    )


def _move_or_wait(
    owner: Candidate, free: Sequence[Candidate], tokens: int, waited_s: float
) -> Choice:
    best = min(free, key=lambda one: (one.answers_in_s(tokens), one.last_used))
    refill_s = owner.cached_tokens / owner.prefill_tps
    worth_s = _SOONER * best.answers_in_s(tokens) + refill_s - owner.answers_in_s(tokens)
    if owner.free_in_s > worth_s or waited_s >= worth_s:
        return Choice(best.name)
    return Choice(None, worth_s - waited_s)
