"""Which instance takes a request: the rule of every policy, over facts. Pure.

`affinity`, the default:

1. A conversation that an instance is home to, and holds more than a few tokens of, goes there. It
   leaves only if home has no slot free and another has, and waiting for home takes longer than the
   answer elsewhere would: a quarter more than that, and once more the time in which home's cache
   was filled. Who waits for home waits no longer than that either, so an estimate that was wrong
   costs twice the move at most.
2. A new conversation goes, among the instances that are home to less than 1.25 times their share
   and one more (the first few would else part what belongs together), where most of its prompt is
   held already, then to the fewest homes, then to the least busy.

`least-busy` takes the fewest requests for each slot, `round-robin` who was asked longest ago.

An instance that is spare, as one on another machine mostly is, takes only what finds no slot free
elsewhere; a conversation whose home it became stays there.

Never does a request go to an instance without a free slot. Source: bounded loads after Mirrokni,
Thorup and Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2016.
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
    """An instance that may be asked, as one request sees it.

    Attributes:
        name: Its name.
        slots: Sequences it decodes at once, at least 1.
        slots_in_use: How many of them are in use.
        last_used: When it was last asked, in a count of its own; 0 for never.
        conversations: Conversations it is home to.
        cached_tokens: Tokens of this prompt that it is believed to hold.
        backlog_tokens: Tokens of prompts that it still has to compute.
        prefill_tps: Tokens of prompts it computes each second, above 0.
        free_in_s: Seconds until a slot is free, as far as can be told; 0 where one is.
        is_spare: Whether it is for what finds no slot free elsewhere.
        needed: How many of its slots the request would use.
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

    @property
    def is_free(self) -> bool:
        """Return whether as many slots are free as the request needs."""
        return self.slots_in_use + self.needed <= self.slots

    @property
    def load(self) -> float:
        """Return the share of its slots that is taken."""
        return self.slots_in_use / self.slots

    @property
    def has_useful_cache(self) -> bool:
        """Return whether it holds enough of the prompt to matter."""
        return self.cached_tokens >= _WORTH_TOKENS

    def answers_in_s(self, tokens: int) -> float:
        """Return when a prompt of so many tokens would be computed, with a slot free now."""
        new_tokens = max(0, tokens - self.cached_tokens)
        return (self.backlog_tokens + new_tokens) / self.prefill_tps


@dataclass(frozen=True, slots=True)
class Choice:
    """What a request does now.

    Attributes:
        name: The instance to take a slot of, or None: wait.
        moves_in_s: Seconds after which it would leave home for a slot that is free elsewhere;
            None where no slot is free, so that only an event can change anything.
    """

    name: str | None
    moves_in_s: float | None = None


def choose(
    policy: Policy, candidates: Sequence[Candidate], tokens: int, home: str | None, waited_s: float
) -> Choice:
    """Choose the instance for one request.

    Args:
        policy: The rule.
        candidates: Those that may be asked at all.
        tokens: How long the prompt is.
        home: The instance that has its conversation, or None; only `prefix_index` looks at it.
        waited_s: How long the request has waited already.
    """
    free = [one for one in candidates if one.is_free]
    if not free:
        return Choice(None)
    first = [one for one in free if not one.is_spare] or free
    if policy == "round-robin":
        return Choice(min(first, key=lambda one: one.last_used).name)
    if policy == "least-busy":
        return Choice(min(first, key=lambda one: (one.load, one.last_used)).name)
    at_home = next((one for one in candidates if one.name == home and one.has_useful_cache), None)
    if at_home is None:
        peers = [one for one in candidates if one.is_spare == first[0].is_spare]
        return Choice(_for_new_conversation(first, peers).name)
    if at_home.is_free:
        return Choice(at_home.name)
    return _move_or_wait(at_home, free, tokens, waited_s)


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
    home: Candidate, free: Sequence[Candidate], tokens: int, waited_s: float
) -> Choice:
    best = min(free, key=lambda one: (one.answers_in_s(tokens), one.last_used))
    refill_s = home.cached_tokens / home.prefill_tps
    worth_s = _SOONER * best.answers_in_s(tokens) + refill_s - home.answers_in_s(tokens)
    if home.free_in_s > worth_s or waited_s >= worth_s:
        return Choice(best.name)
    return Choice(None, worth_s - waited_s)
