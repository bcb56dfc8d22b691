"""Decides whether a model drafts, by its speed with and without drafts. Pure, except for files.

No known build takes drafting from a request, so each change needs another instance. The side in use
is compared with a trial of the other side: how long would the other have taken for the same tokens,
with as many busy slots? Speeds fade, because what a model writes changes. A trial costs speed while
the worse side runs, so trials are short against the time between them, which doubles each time that
the side in use was better.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter

from supervisor.plan.setting import Setting
from supervisor.system import files

SPEC_TYPE: Final = "spec-type"
NONE: Final = "none"
ORIGIN: Final = "measured"

# Decoded tokens and the seconds that they took, by the number of busy slots.
Speeds = Mapping[int, tuple[float, float]]

# The speed of the side in use is that of about so many tokens.
_WINDOW_TOKENS: Final = 4000
# The first trial begins after so many tokens, later ones after 50 times the tokens of a trial or
# more: the trial of a side of half the speed then costs 2 % or less.
_FIRST_TOKENS: Final = 300
_LATER_TOKENS: Final = 100_000
_LATEST_TOKENS: Final = 1_600_000
# A trial begins this many times earlier if the other side may be better: it was faster at the
# numbers of busy slots of late, or is unknown for them.
_EARLIER: Final = 8
_TRIAL_TOKENS: Final = 2000
_TRIAL_REQUESTS: Final = 12
_TRIAL_MOST_TOKENS: Final = 8000
# A trial of a side that is this slow ends early: after so many tokens, or at its second request
# once the side in use would have decoded as many more in that time.
_SLOW: Final = 0.8
_SLOW_TOKENS: Final = 400
_SLOW_REQUESTS: Final = 4
# Tokens until the next trial, for each token that the side in use would have decoded more.
_PAUSE_PER_LOST: Final = 100
# The other side replaces the side in use if it is so many times as fast.
_FASTER: Final = 1.02
# Both sides must have met the numbers of busy slots of this share of the tokens, and each for so
# many tokens.
_SHARED: Final = 0.5
_KNOWN_TOKENS: Final = 64


@dataclass(frozen=True, slots=True)
class DraftSpeed:
    """The speeds of a model with one way of drafting, and whether it drafts."""

    spec_type: str  # the value of `--spec-type` with drafts
    drafts: bool = True  # whether it drafts, apart from trials
    own: Speeds = field(default_factory=dict)  # of the side in use
    other: Speeds = field(default_factory=dict)  # of the last trial, or of the running one
    trial_requests: int = 0
    trial_tokens: float = 0
    tokens: float = 0  # decoded since the last trial
    pause_tokens: float = _FIRST_TOKENS  # between two trials
    # How many times as fast it decoded with drafts in the last trial; None before one.
    speedup: float | None = None

    def others_speed(self, mix: Speeds) -> float | None:
        """Return how many times as fast the other side decodes with the busy slots of `mix`.

        None if the sides did not meet most of them.
        """
        known = {
            busy
            for busy in self.own.keys() & self.other.keys()
            if min(self.own[busy][0], self.other[busy][0]) >= _KNOWN_TOKENS
        }
        tokens = {busy: count for busy, (count, _) in mix.items() if busy in known}
        if not tokens or sum(tokens.values()) < _SHARED * sum(count for count, _ in mix.values()):
            return None
        own_s, other_s = (
            sum(count * side[busy][1] / side[busy][0] for busy, count in tokens.items())
            for side in (self.own, self.other)
        )
        return own_s / other_s

    @property
    def setting(self) -> Setting | None:
        """The value of `--spec-type` with its reason; None before the first comparison."""
        if self.speedup is None:
            return None
        busy = " or ".join(map(str, sorted(self.own.keys() & self.other.keys())))
        slots = f"{busy} busy {'slot' if busy == '1' else 'slots'}"
        reason = f"decoding was {self.speedup:.2f} times as fast with drafts, with {slots}"
        again = f"compared again {self.pause_tokens:,.0f} tokens after that"
        return Setting(self._value(drafts=self.drafts), ORIGIN, f"{reason}; {again}")

    def trial(self) -> Setting:
        """Return the value of `--spec-type` of the other side."""
        value = self._value(drafts=not self.drafts)
        return Setting(value, ORIGIN, f"a trial, against {self._value(drafts=self.drafts)}")

    def _value(self, *, drafts: bool) -> str:
        return self.spec_type if drafts else NONE


def count(
    speed: DraftSpeed, *, drafts: bool, busy: int, tokens: float, seconds: float
) -> DraftSpeed:
    """Count the decoded tokens of a request that ran with or without drafts."""
    if drafts == speed.drafts:
        own = _add(speed.own, busy, tokens, seconds)
        return replace(speed, own=own, tokens=speed.tokens + tokens)
    return replace(
        speed,
        other=_add(speed.other, busy, tokens, seconds),
        trial_requests=speed.trial_requests + 1,
        trial_tokens=speed.trial_tokens + tokens,
    )


def _add(speeds: Speeds, busy: int, tokens: float, seconds: float) -> Speeds:
    kept = max(0.0, 1 - tokens / _WINDOW_TOKENS)
    faded = {slots: (count * kept, its_s * kept) for slots, (count, its_s) in speeds.items()}
    before, before_s = faded.get(busy, (0.0, 0.0))
    return {**faded, busy: (before + tokens, before_s + seconds)}


def decide(speed: DraftSpeed, *, drafts: bool) -> tuple[DraftSpeed, bool]:
    """Return the state after the decision, and whether the model shall draft from now on.

    `drafts` tells whether it drafts now. A trial runs while that differs from the state.
    """
    if drafts != speed.drafts:
        return _judge(speed)
    others = speed.others_speed(speed.own)
    is_doubtful = others is None or others > _FASTER
    pause = speed.pause_tokens / _EARLIER if is_doubtful else speed.pause_tokens
    if speed.tokens < max(_FIRST_TOKENS, pause):
        return speed, drafts
    return replace(speed, other={}, trial_requests=0, trial_tokens=0), not drafts


def _judge(speed: DraftSpeed) -> tuple[DraftSpeed, bool]:
    """Let the trial go on, or end it with its result."""
    tokens, requests = speed.trial_tokens, speed.trial_requests
    others = speed.others_speed(speed.other)
    is_slow = others is not None and others < _SLOW
    is_enough = others is not None and tokens >= _TRIAL_TOKENS and requests >= _TRIAL_REQUESTS
    lost = tokens * (1 / others - 1) if others else 0.0
    is_lost = is_slow and (
        (tokens >= _SLOW_TOKENS and requests >= _SLOW_REQUESTS)
        or (lost >= _SLOW_TOKENS and requests > 1)
    )
    may_go_on = speed.own and tokens < _TRIAL_MOST_TOKENS
    if may_go_on and not (is_enough or is_lost):
        return speed, not speed.drafts
    if others is not None:
        speed = replace(speed, speedup=1 / others if speed.drafts else others)
    if others is not None and others > _FASTER:
        ended = replace(speed, drafts=not speed.drafts, own=speed.other, other=speed.own)
        return replace(ended, tokens=0, pause_tokens=_LATER_TOKENS), ended.drafts
    return postpone(speed, lost), speed.drafts


def postpone(speed: DraftSpeed, lost_tokens: float = 0) -> DraftSpeed:
    """Keep the side in use, until a trial in twice as many tokens as the last one waited for.

    A trial that has lost many tokens is repeated later.
    """
    least = max(_LATER_TOKENS, _PAUSE_PER_LOST * lost_tokens)
    pause = min(_LATEST_TOKENS, max(least, 2 * speed.pause_tokens))
    return replace(speed, tokens=0, pause_tokens=pause)


_ADAPTER: Final = TypeAdapter(DraftSpeed)


def read(directory: Path, key: str) -> DraftSpeed | None:
    """Return the speeds that `write` stored; None without any, or of another version."""
    with suppress(ValueError):
        return _ADAPTER.validate_python(files.get(directory, key))
    return None


def write(directory: Path, key: str, speed: DraftSpeed) -> None:
    files.put(directory, key, asdict(speed))
