"""Which slot of a process holds which conversation, as far as that can be told from outside. Pure.

An engine that matches no prompts (`--slot-prompt-similarity 0`) takes the slot used longest ago,
and looks for the conversation only among those that were saved when the last task began: a turn
that follows its answer at once is read anew. It goes to the slot that still holds its conversation
if the request names that slot, and nothing is copied at all. On such an engine that is safe even
where the slot is in use: the request waits, and nobody's text changes. (On one that does match
prompts it is not.) A page that takes no number is led there instead: all other idle slots are used
once more, for an empty prompt, which leaves what they hold as it is; then the one that holds the
conversation is the one used longest ago.

So the slots are followed: a request that names none is taken to get the one used longest ago, and
of those never used the last. Where that is only a guess, or others (a probe, a restart from saved
slots) may have been there, the engine's own page is looked at: it tells which slot began its last
task when, and how many tokens each holds, and we know in which order we asked.

Source: measured on build 10434; server-context.cpp of llama.cpp, get_available_slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

from proxy.engine.slots import Seen
from proxy.home.chain import Filled
from proxy.home.prefix import Prompt

# What others do to the slots of an idle engine they do after a while; until then nobody looks.
_FRESH_S: Final = 5.0
# The last token of an answer is not in the cache, nor is the one that ends it.
_TOKENS_AWAY_MAX: Final = 2


@dataclass(slots=True, eq=False)
class Berth:
    """One slot, and what it is believed to hold.

    Attributes:
        slot: Its number.
        talk: The conversation that it holds, or None for one that nobody will come back for.
        tokens: Tokens of that conversation.
        blocks: Those of the last prompt of it that was answered.
        task: Where it was filled from a disk and nobody has asked it since, the number of its last
            task: while that stays so, it holds the same. None everywhere else.
        is_sure: Whether the number is known, and not only guessed from the order of use.
        holder: Whose request uses it, or None.
        asked: When it was last asked, in a count of its own; 0 for never.
        used: When it was last given back, in a count of its own; 0 for never.
    """

    slot: int
    talk: object | None = None
    tokens: int = 0
    blocks: tuple[int, ...] = ()
    task: int | None = None
    is_sure: bool = False
    holder: object | None = None
    asked: int = 0
    used: int = 0

    def empty(self) -> None:
        """Note that nobody will come back for what it holds."""
        self.talk, self.tokens, self.blocks, self.task = None, 0, (), None

    def proves(self, prompt: Prompt | None) -> bool:
        """Return whether the answer to a prompt shows what became of what it was filled with.

        So it is for the first request that names the slot and goes on from the prompt that was
        answered last. How much of it the engine must have, its tokens tell: a template may put it
        otherwise on another day.
        """
        ours, its = self.blocks, prompt.blocks if prompt else ()
        goes_on = 0 < len(ours) <= len(its) and its[len(ours) - 1] == ours[-1]
        return self.is_sure and self.task is not None and goes_on


class Berths:
    """The slots of one process.

    Args:
        slots: How many there are, at least 1.
    """

    def __init__(self, slots: int) -> None:
        self._berths = [Berth(number) for number in range(slots)]
        self._turn = count(1)
        self._seen_at_s = float("-inf")

    @property
    def tokens(self) -> int:
        """Return how many tokens of conversations they hold, as far as is known."""
        return sum(berth.tokens for berth in self._berths if berth.talk is not None)

    def fill(self, filled: Filled, talk: object | None) -> None:
        """Note what a slot holds as the process begins; to be told in the order of their tasks."""
        for berth in self._berths:
            if berth.slot == filled.slot:
                berth.talk, berth.tokens = talk, filled.tokens
                berth.blocks, berth.task = filled.chain.blocks, filled.task
                if filled.task >= 0:
                    berth.asked = berth.used = next(self._turn)

    def board(self, holder: object, talk: object | None, now_s: float) -> Berth | None:
        """Give a request the slot that holds its conversation, else the one the engine would take.

        Args:
            holder: The request.
            talk: Its conversation, or None where no slot is to be named.
            now_s: Monotonic time.

        Returns:
            None where no slot is known to be free.
        """
        is_stale = now_s - self._seen_at_s > _FRESH_S
        for one in self._berths:
            # What a slot was filled with is sure when seen by the very request that asks for it.
            if is_stale or one.task is not None:
                one.is_sure = False
        idle = [berth for berth in self._berths if berth.holder is None]
        berth = next((one for one in idle if talk is not None and one.talk is talk), None)
        if berth is None and idle:
            berth = min(idle, key=_age)
            berth.empty()
            berth.is_sure = False
        if berth:
            berth.holder = holder
        return berth

    def change(self, berth: Berth, talk: object, now_s: float) -> Berth | None:
        """Give a request another slot, for the one it has does not hold its conversation."""
        holder, berth.holder = berth.holder, None
        return self.board(holder, talk, now_s)

    def lead(self, berth: Berth) -> Berth:
        """Give a request the slot used longest ago of those whose number is sure, if there is one.

        That is for a request that is led, and comes for no conversation.
        """
        holder, berth.holder = berth.holder, None
        sure = (one for one in self._berths if one.is_sure and one.holder is None)
        led = min(sure, key=_age, default=berth)
        led.empty()
        led.holder = holder
        return led

    def is_unsaved(self, berth: Berth) -> bool:
        """Return whether another idle slot holds what came after the engine's last task began.

        Of that the engine makes nothing for other slots: it looks among what it saved then.
        """
        begun = max(one.asked for one in self._berths)
        idle = (one for one in self._berths if one.holder is None and one is not berth)
        return any(one.used > begun for one in idle)

    def pass_by(self, berth: Berth) -> list[int]:
        """Note that all other idle slots are used at once, for nothing; return their numbers."""
        turn = next(self._turn)
        others = [one for one in self._berths if one.holder is None and one is not berth]
        for one in others:
            one.asked = one.used = turn
            one.task = None
        return [one.slot for one in others]

    def depart(self, berth: Berth) -> None:
        """Note that the request goes out now."""
        berth.asked, berth.task = next(self._turn), None

    def leave(self, holder: object, now_s: float) -> None:
        """Note that a request is over; what its slot holds is not known any more."""
        for berth in self._berths:
            if berth.holder is holder:
                berth.holder, berth.used = None, next(self._turn)
                berth.empty()
                self._seen_at_s = now_s

    def know(self, berth: Berth, talk: object, tokens: int, blocks: tuple[int, ...] = ()) -> None:
        """Note what a slot holds after an answer, unless the next request has it already."""
        if berth.holder is None:
            for other in self._berths:
                if other.talk is talk:
                    other.empty()
            berth.talk, berth.tokens, berth.blocks = talk, tokens, blocks

    def held(self, page: Sequence[Seen], now_s: float) -> dict[int, Berth]:
        """Return the slots that are known to hold a conversation and are idle, by number."""
        self.confirm(page, None, now_s)
        idle = (one for one in self._berths if one.holder is None and one.is_sure)
        return {one.slot: one for one in idle if one.talk is not None}

    def confirm(self, page: Sequence[Seen], boarding: Berth | None, now_s: float) -> None:
        """Find each slot's number by what the engine says of all of them.

        Who was asked last comes first on both sides; those used at once come in any order. A task
        that is not ours has no berth here, and a conversation that nothing fits is in no slot any
        more.

        Args:
            page: What the engine says.
            boarding: The slot of a request that has not gone out yet, or None.
            now_s: Monotonic time.
        """
        self._seen_at_s = now_s
        rest = sorted(self._berths, key=lambda one: one.asked, reverse=True)
        lost: list[Berth] = []
        strange: list[int] = []
        for seen in sorted(page, key=lambda one: one.task, reverse=True):
            at = _place(rest, seen, boarding)
            if at is None:
                strange.append(seen.slot)
                continue
            berth = rest.pop(at)
            berth.slot, berth.is_sure = seen.slot, True
            while rest and rest[0].asked > berth.asked:
                lost.append(rest.pop(0))
        for berth, slot in zip((*lost, *rest), strange, strict=False):
            berth.empty()
            berth.slot, berth.is_sure = slot, False


def _age(berth: Berth) -> tuple[int, int]:
    """Return what sorts slots as engines take them: used longest ago, of unused ones the last."""
    return berth.used, -berth.slot


def _place(berths: Sequence[Berth], seen: Seen, boarding: Berth | None) -> int | None:
    """Return which berth is a slot that the engine tells of: the first, or one that surely is.

    Of those that were used at once, each may be the first.
    """
    sure = [at for at, one in enumerate(berths) if _holds(one, seen)]
    first = [at for at, one in enumerate(berths) if one.asked == berths[0].asked]
    may_be = [at for at in first if _may_be(berths[at], seen, boarding)]
    return next(iter((*(at for at in sure if at in may_be), *may_be, *sure)), None)


def _may_be(berth: Berth, seen: Seen, boarding: Berth | None) -> bool:
    if (berth.asked == 0) != (seen.task < 0):
        return False
    is_open = berth.talk is None or (berth.holder is not None and berth is not boarding)
    return is_open or _holds(berth, seen)


def _holds(berth: Berth, seen: Seen) -> bool:
    is_idle = berth.talk is not None and not seen.is_busy
    if berth.task is not None:  # nor does it tell how much it was filled with
        return is_idle and (berth.slot, berth.task) == (seen.slot, seen.task)
    return is_idle and 0 <= berth.tokens - seen.tokens <= _TOKENS_AWAY_MAX
