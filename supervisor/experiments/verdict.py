"""The figures of a trial's two sides, their comparison, and the decision on a canary. Does no I/O.

Figures are kept in bounded memory, by conversation, because requests of one resemble each other. A
conversation counts for the side that serves it, from its first request until it changes sides. It
counts for neither if its own side was full or not ready: such conversations come from busy moments,
and would make the side that helps look slower.

Only requests under equal load are compared. The side with the larger share decodes more requests at
once, which makes each slower with any profile. So requests with none, one, two … others beside
them are picked in the same proportions from both sides.

Automatic decisions compare blocks of time. Other programs on a machine change for seconds at a
time, and may slow down one engine alone, so requests of one moment resemble each other whichever
conversations they belong to: of two equal engines on a busy machine, one was 1.2 (1.1 to 1.4) times
slower by its conversations. Each of 20 blocks of time is one observation: the ratio of both sides
in it, under equal load.

Error rates are compared by intervals of Wilson's score, which hold for few requests and for no
errors. Source: Newcombe, "Interval estimation for the difference between independent proportions",
1998, method 10.

A canary is withdrawn at a crash, and at any time if it is shown to be worse: more errors, or slower
by more than the margin. When its time is over, it is promoted if the intervals exclude that it is
slower by more than the margin, and withdrawn otherwise.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from statistics import NormalDist
from typing import Any, Final, Literal

from supervisor.bench import figures as bench

# A value, and how many other requests its engine had at that time.
Value = tuple[float, int]
Conversations = Sequence[Sequence[Value]]
Picked = list[list[float]]


def under_equal_load(base: Conversations, trial: Conversations) -> tuple[Picked, Picked]:
    """Pick requests so that both sides have the same proportions of each load."""
    own, tried = (
        Counter(others for conversation in side for _, others in conversation)
        for side in (base, trial)
    )
    # The share of requests under each load that both sides have at least.
    shares = {
        others: min(own[others] / own.total(), tried[others] / tried.total())
        for others in sorted(own.keys() & tried.keys())
    }
    return _thin_values(base, shares, own), _thin_values(trial, shares, tried)


def count(conversations: Sequence[Sequence[object]]) -> int:
    return sum(map(len, conversations))


def _thin_values(
    conversations: Conversations, shares: Mapping[int, float], counts: Counter[int]
) -> Picked:
    """Keep about a share of all values under each load, spread evenly."""
    seen: Counter[int] = Counter()

    def thin(values: Sequence[Value]) -> Iterator[float]:
        for value, others in values:
            kept_share = shares.get(others, 0.0) * counts.total() / counts[others]
            before = seen[others]
            seen[others] += 1
            if _floor(seen[others] * kept_share) > _floor(before * kept_share):
                yield value

    return [found for conversation in conversations if (found := list(thin(conversation)))]


def _floor(number: float) -> int:
    """Round down, tolerating an error in the last digit."""
    return math.floor(number + 1e-9)


# A time (monotonic), a value, and how many other requests its engine had.
Timed = tuple[float, float, int]
_Blocks = Mapping[int, Sequence[Sequence[Value]]]

_BLOCKS: Final = 20
_BLOCK_MIN_S: Final = 5.0
_PAIRS_MIN: Final = 5


def compare_over_time(
    base: Sequence[Timed], other: Sequence[Timed], *, words: bench.Words
) -> bench.Comparison:
    """Compare two sides; an interval needs five blocks with requests of both."""
    pairs = list(_pairs(base, other))
    enough = pairs if len(pairs) >= _PAIRS_MIN else pairs[:1]
    return bench.compare([own for own, _ in enough], [tried for _, tried in enough], words=words)


def _pairs(base: Sequence[Timed], other: Sequence[Timed]) -> Iterator[tuple[float, float]]:
    times = [at_s for at_s, _, _ in (*base, *other)]
    if not times:
        return
    begin_s = min(times)
    length_s = max(_BLOCK_MIN_S, (max(times) - begin_s) / _BLOCKS)
    sides = [_time_blocks(side, begin_s, length_s) for side in (base, other)]
    for block in sorted(sides[0].keys() & sides[1].keys()):
        # The median ignores a single wait for the processor.
        own, tried = map(_median, under_equal_load(sides[0][block], sides[1][block]))
        if own is not None and tried is not None:
            yield own, tried


def _time_blocks(side: Sequence[Timed], begin_s: float, length_s: float) -> _Blocks:
    blocks: dict[int, list[list[Value]]] = defaultdict(list)
    for at_s, value, others in side:
        if value > 0:
            blocks[min(_BLOCKS - 1, int((at_s - begin_s) / length_s))].append([(value, others)])
    return blocks


SideName = Literal["base", "trial"]
SIDES: Final[tuple[SideName, SideName]] = ("base", "trial")

_CONVERSATIONS_MAX: Final = 1000
_REQUESTS_MAX: Final = 32
_TIMED_MAX: Final = 8192
# The rate of a shorter answer is mostly noise.
_TOKENS_MIN: Final = 4
_OTHERS_MAX: Final = 7


FigureName = Literal["tokens_per_second", "first_token_s"]
FIGURES: Final[Mapping[FigureName, bench.Words]] = {
    "tokens_per_second": bench.RATE,
    "first_token_s": bench.TIME,
}


class Conversation:
    """The latest values of a conversation's requests, at most 32 of each figure, with their load.

    If its side was full or not ready at a request, it is excluded, and later requests add none.
    """

    def __init__(self) -> None:
        self.values: Mapping[FigureName, deque[Value]] = {
            name: deque(maxlen=_REQUESTS_MAX) for name in FIGURES
        }
        self.is_excluded = False


class Side:
    """The figures of one side: the latest 1000 conversations and the latest timed values.

    `others` sums up, over requests, the other requests that its engine had meanwhile.
    """

    def __init__(self) -> None:
        self.conversations: OrderedDict[str, Conversation] = OrderedDict()
        self.timed: Mapping[FigureName, deque[Timed]] = {
            name: deque(maxlen=_TIMED_MAX) for name in FIGURES
        }
        self.requests = self.errors = self.crashes = self.others = 0

    @property
    def excluded(self) -> int:
        return sum(conversation.is_excluded for conversation in self.conversations.values())

    def values(self, figure: FigureName) -> list[Sequence[Value]]:
        found = (conversation.values[figure] for conversation in self.conversations.values())
        return [list(values) for values in found if values]

    def latest(self, key: str) -> Conversation:
        """Return a conversation as the latest; forget the oldest if there are too many."""
        found = self.conversations.setdefault(key, Conversation())
        self.conversations.move_to_end(key)
        if len(self.conversations) > _CONVERSATIONS_MAX:
            self.conversations.popitem(last=False)
        return found


class TrialFigures:
    def __init__(self) -> None:
        self.sides: dict[SideName, Side] = {name: Side() for name in SIDES}

    def count_failure(self, side: SideName) -> None:
        """Count a request that this side failed and the other side answered."""
        self.sides[side].requests += 1
        self.sides[side].errors += 1

    def count_request(
        self,
        name: SideName,
        fields: Mapping[str, Any],
        others: int,
        at_s: float = 0.0,
        *,
        is_fair: bool = True,
    ) -> None:
        """Count a finished request that a side answered, from the fields of `request.finished`.

        `others` are the engine's other requests meanwhile, `at_s` is the monotonic time of its end,
        and `is_fair` tells whether both sides could have answered it.
        """
        side, status = self.sides[name], fields["status"]
        side.requests += 1
        side.others += others
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            side.errors += 1
        conversation = self._conversation(name, fields)
        conversation.is_excluded |= not is_fair or bool(fields["diverted"])
        if status == HTTPStatus.OK and not conversation.is_excluded:
            load = min(others, _OTHERS_MAX)
            for figure, value in _values_of(fields):
                conversation.values[figure].append((value, load))
                side.timed[figure].append((at_s, value, load))

    def _conversation(self, name: SideName, fields: Mapping[str, Any]) -> Conversation:
        """Return a request's conversation; exclude it if the other side has it."""
        key = str(fields["conversation"] or fields["request"])
        if other := self.sides["base" if name == "trial" else "trial"].conversations.get(key):
            other.is_excluded = True
            return other
        return self.sides[name].latest(key)


def _values_of(fields: Mapping[str, Any]) -> Iterator[tuple[FigureName, float]]:
    if (first_token_ms := fields["first_token_ms"]) is not None:
        yield "first_token_s", first_token_ms / 1000
    tokens = fields["decoded_tokens"] or 0
    decode_ms = fields["engine_decode_ms"] or fields["decode_ms"]
    if tokens >= _TOKENS_MIN and decode_ms > 0:
        yield "tokens_per_second", (tokens - 1) * 1000 / decode_ms


# If a side's engines have this many more requests at once, a note reports it.
_UNEQUAL_LOAD: Final = 0.5
_TO_GO_MAX: Final = 100_000


@dataclass(frozen=True, slots=True)
class FigureVerdict:
    """One figure of both sides."""

    medians: Mapping[SideName, float | None]  # of the requests of a side; None without any
    comparison: bench.Comparison
    outcome: str  # the difference with its interval, or the number of requests that would show it
    # More requests of both sides that would show a 5 % difference; None if unknown.
    to_go: int | None
    compared: int  # requests of both sides that ran under equal load


# Of each figure, and notes for people.
TrialVerdict = tuple[Mapping[FigureName, FigureVerdict], list[str]]


def verdict(figures: TrialFigures) -> TrialVerdict:
    """Compare by conversation, for people."""
    base, trial = (figures.sides[name] for name in SIDES)
    found = {
        name: _figure(base.values(name), trial.values(name), words)
        for name, words in FIGURES.items()
    }
    load_note = _load_note(base, trial, found["first_token_s"].compared)
    return found, list(filter(None, (load_note, _excluded_note(figures))))


def verdict_over_time(figures: TrialFigures) -> TrialVerdict:
    """Compare by time block, for automatic decisions without a review."""
    base, trial = (figures.sides[name] for name in SIDES)
    found = {
        name: _figure_over_time(base.timed[name], trial.timed[name], words)
        for name, words in FIGURES.items()
    }
    return found, list(filter(None, [_excluded_note(figures)]))


def _figure_over_time(
    base: Sequence[Timed], trial: Sequence[Timed], words: bench.Words
) -> FigureVerdict:
    comparison = compare_over_time(base, trial, words=words)
    medians = (_median([[value for _, value, _ in side]]) for side in (base, trial))
    if comparison.is_different:
        outcome = comparison.verdict
    elif math.isinf(comparison.high):
        outcome = "too few requests under equal load to compare"
    else:
        outcome = f"no difference seen ({comparison.low:.2f}–{comparison.high:.2f} ×)"
    return FigureVerdict(dict(zip(SIDES, medians, strict=True)), comparison, outcome, None, 0)


def _figure(all_base: Conversations, all_trial: Conversations, words: bench.Words) -> FigureVerdict:
    base, trial = under_equal_load(all_base, all_trial)
    comparison, to_go = (
        bench.compare_unpaired(base, trial, words=words),
        bench.requests_to_go(base, trial),
    )
    compared, known = count(base) + count(trial), count(all_base) + count(all_trial)
    if to_go is not None:
        to_go = to_go * known // compared
    medians = [
        _median(picked or [[value for value, _ in values] for values in every])
        for picked, every in ((base, all_base), (trial, all_trial))
    ]
    outcome = _outcome(comparison, to_go)
    return FigureVerdict(
        dict(zip(SIDES, medians, strict=True)), comparison, outcome, to_go, compared
    )


def _median(conversations: Sequence[Sequence[float]]) -> float | None:
    values = [value for conversation in conversations for value in conversation]
    return statistics.median(values) if values else None


def _outcome(comparison: bench.Comparison, to_go: int | None) -> str:
    if comparison.is_different:
        return comparison.verdict
    if to_go is None:
        return "too few conversations under equal load to compare"
    interval = f"{comparison.low:.2f}–{comparison.high:.2f} ×"
    if to_go == 0:
        return f"no difference of 5 % or more ({interval})"
    more = "more than " if to_go >= _TO_GO_MAX else "about "
    unit: int = 10 ** max(0, len(str(to_go)) - 2)  # two digits, rounded up
    count = math.ceil(to_go / unit) * unit
    return f"no difference seen yet ({interval}), {more}{count} requests to go"


def _load_note(base: Side, trial: Side, compared: int) -> str | None:
    if not (base.requests and trial.requests):
        return None
    own, tried = base.others / base.requests, trial.others / trial.requests
    if abs(own - tried) < _UNEQUAL_LOAD:
        return None
    return (
        f"a request met {own:.1f} others on its engine, one of the trial {tried:.1f}; "
        f"compared are {compared} requests under equal load"
    )


def _excluded_note(figures: TrialFigures) -> str | None:
    excluded = sum(side.excluded for side in figures.sides.values())
    if not excluded:
        return None
    which = f"{excluded} conversations are" if excluded > 1 else "1 conversation is"
    return f"{which} left out from where a side was full or not ready"


# The level of every claimed difference: people look often.
_LEVEL: Final = 0.99
_Z: Final = NormalDist().inv_cdf((1 + _LEVEL) / 2)


def least_increase(base: tuple[int, int], other: tuple[int, int]) -> float:
    """Return the lower end of the 99 % interval of how much higher another error rate is.

    Each side is a number of errors and of requests. Below 0 if the rate may as well be lower; -1
    without requests on one side.
    """
    if not (base[1] and other[1]):
        return -1.0
    own, tried = base[0] / base[1], other[0] / other[1]
    (_, own_high), (tried_low, _) = _wilson(*base), _wilson(*other)
    return tried - own - math.hypot(tried - tried_low, own_high - own)


def _wilson(errors: int, requests: int) -> tuple[float, float]:
    rate, spread = errors / requests, _Z**2 / requests
    middle = rate + spread / 2
    half = math.sqrt(spread * (rate * (1 - rate) + spread / 4))
    return (middle - half) / (1 + spread), (middle + half) / (1 + spread)


# A first token that is later by less is not noticeable.
_UNNOTICED_S: Final = 0.05

# The next step, and its reason, a clause for people.
Decision = tuple[Literal["wait", "promote", "withdraw"], str]


def decide(figures: TrialFigures, margin: float, *, is_over: bool) -> Decision:
    base, tried = figures.sides["base"], figures.sides["trial"]
    if tried.crashes:
        return "withdraw", "its engine crashed"
    if least_increase((base.errors, base.requests), (tried.errors, tried.requests)) > 0:
        shares = [f"{side.errors} of {side.requests} requests" for side in (tried, base)]
        return "withdraw", f"it has more errors: {' against '.join(shares)}"
    found = list(_slownesses(figures))
    if slow := [text for low, _, text in found if low > 1 + margin]:
        return "withdraw", ", ".join(slow)
    if not is_over:
        return "wait", ""
    if unknown := [text for _, high, text in found if high > 1 + margin]:
        may = f"it may be slower by more than {100 * margin:g} %"
        return "withdraw", f"{', '.join(unknown)}; {may}"
    return "promote", ", ".join(text for _, _, text in found)


def _slownesses(figures: TrialFigures) -> Iterator[tuple[float, float, str]]:
    """Yield of each figure how many times slower the canary is, at least and at most, as text too.

    The least is 0 unless a difference is shown.
    """
    found, _ = verdict_over_time(figures)
    rate, first = found["tokens_per_second"], found["first_token_s"]
    low, high = rate.comparison.low, rate.comparison.high
    least, most = (1 / bound if bound else math.inf for bound in (high, low))
    yield least if rate.comparison.is_different else 0.0, most, f"tokens/s {rate.outcome}"
    base_s, trial_s = first.medians["base"], first.medians["trial"]
    if base_s is None or trial_s is None or trial_s - base_s >= _UNNOTICED_S:
        least = first.comparison.low if first.comparison.is_different else 0.0
        yield least, first.comparison.high, f"first token {first.outcome}"
