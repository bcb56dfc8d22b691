"""From recorded requests to those of a replay. Pure.

Taken are the latest conversations, whole as far as the limits allow. A request is sent once all
that had ended before it began are answered, after a pause of at most the limit: so as many are in
flight as there were, whatever the speed of the variant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from supervisor.request_record.recorded_request import RecordedRequest

_PAUSE_MAX_S: Final = 0.25
_REQUESTS_MAX: Final = 64
# Times as clocks tell them: a request that begins this soon after an end may have begun before it.
_CLOCK_S: Final = 0.002


@dataclass(frozen=True, slots=True)
class ReplayLimits:
    """Limits of one run, in tokens.

    Attributes:
        context: Of one request, prompt and answer.
        prompts: Computed of all prompts.
        answers: Of all answers.
    """

    context: int
    prompts: int
    answers: int


@dataclass(frozen=True, slots=True)
class ReplayedRequest:
    """One request to send.

    Attributes:
        conversation: Its number, from 0.
        prompt: Tokens of the prompt.
        shared: Of these, tokens at its beginning that repeat the conversation so far, or in its
            first request what other conversations begin with too.
        answer: Tokens to generate.
        after: The places of the requests that are answered before it is sent.
    """

    conversation: int
    prompt: int
    shared: int
    answer: int
    after: tuple[int, ...]
    pause_s: float


@dataclass(frozen=True, slots=True)
class _Timed:
    """A recorded request, with its beginning in seconds since that of the first."""

    request: RecordedRequest
    began_s: float

    @property
    def ended_s(self) -> float:
        return self.began_s + self.request.duration_s


@dataclass(frozen=True, slots=True)
class _Sized:
    """A recorded request with its sizes within the limits."""

    timed: _Timed
    conversation: int
    prompt: int
    shared: int
    answer: int


def plan_replay(
    recorded: Sequence[RecordedRequest], limits: ReplayLimits
) -> tuple[ReplayedRequest, ...]:
    """Return the requests of a replay, in the order in which they began; none without any."""
    chosen: list[_Sized] = []
    for number, conversation in enumerate(_latest_first(_with_times(recorded))):
        sized = _within(_sized(number, conversation, limits.context), limits, chosen)
        if not sized:
            break
        chosen += sized
    return _in_order(sorted(chosen, key=lambda one: one.timed.began_s))


def _with_times(recorded: Iterable[RecordedRequest]) -> list[_Timed]:
    """Add up the pauses; the requests after a restart of the daemon follow all before it."""
    timed: list[_Timed] = []
    began_s = last_end_s = 0.0
    for request in recorded:
        began_s = last_end_s if request.after_any_s is None else began_s + request.after_any_s
        timed.append(_Timed(request, began_s))
        last_end_s = max(last_end_s, timed[-1].ended_s)
    return timed


def _latest_first(timed: Iterable[_Timed]) -> list[list[_Timed]]:
    """Group requests by conversation, the conversation of the last request first."""
    groups: dict[object, list[_Timed]] = {}
    for one in timed:
        number = one.request.conversation
        key = object() if number is None else number
        groups[key] = [*groups.pop(key, []), one]
    return [sorted(group, key=lambda one: one.began_s) for group in reversed(groups.values())]


def _sized(number: int, conversation: Iterable[_Timed], context: int) -> list[_Sized]:
    sized: list[_Sized] = []
    for timed in conversation:
        answer = max(1, min(timed.request.generated_tokens, context // 2))
        prompt = max(1, min(timed.request.prompt_tokens, context - answer))
        shared = _shared(sized[-1] if sized else None, timed.request, prompt)
        sized.append(_Sized(timed, number, prompt, shared, answer))
    return sized


def _shared(before: _Sized | None, request: RecordedRequest, prompt: int) -> int:
    """Return how much of a prompt repeats what came before it.

    A prompt that is longer than the last one goes on from its answer. A shorter one was cut by its
    client: then as much is shared as the cache had.
    """
    if before and prompt > before.prompt:
        return min(prompt, before.prompt + before.answer)
    return min(prompt, request.cached_tokens)


def _within(
    sized: Sequence[_Sized], limits: ReplayLimits, chosen: Sequence[_Sized]
) -> list[_Sized]:
    """Return as many requests of a conversation as fit beside those chosen; one at least."""
    prompts = sum(one.prompt - one.shared for one in chosen)
    answers = sum(one.answer for one in chosen)
    taken: list[_Sized] = []
    for one in sized:
        prompts += one.prompt - one.shared
        answers += one.answer
        is_over = prompts > limits.prompts or answers > limits.answers
        if (is_over and (chosen or taken)) or len(chosen) + len(taken) >= _REQUESTS_MAX:
            break
        taken.append(one)
    return taken


def _in_order(sized: Sequence[_Sized]) -> tuple[ReplayedRequest, ...]:
    replayed = []
    for at, one in enumerate(sized):
        before = [
            place
            for place, other in enumerate(sized[:at])
            if other.timed.ended_s <= one.timed.began_s + _CLOCK_S
        ]
        last_end_s = max((sized[place].timed.ended_s for place in before), default=0.0)
        pause_s = min(_PAUSE_MAX_S, max(0.0, one.timed.began_s - last_end_s)) if before else 0.0
        replayed.append(
            ReplayedRequest(
                one.conversation, one.prompt, one.shared, one.answer, tuple(before), pause_s
            )
        )
    return tuple(replayed)
