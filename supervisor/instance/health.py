"""Decides whether an engine in service is alive: while it has work, something must move. Pure.

That an engine answers proves nothing: llama-server's `/health`, `/slots` and `/metrics` come from
threads that go on when decoding hangs. So the question is what moved since the reading before:

1. bytes of answers, which the proxy counts anyway and which cost nothing to look at;
2. when these stand still, the engine's own counters, asked for rarely. `n_decode_total` grows with
   each batch, the totals of tokens only when a request ends;
3. within one batch nothing of that moves, be it the 12 s that 2048 tokens take on a slow processor.
   The process's processor time does, so an engine that computes is given `batch_timeout_s`, and
   one that does not (stopped, waiting for a lock or for a device that hangs) no more than two
   intervals.

An engine without work is asked for one token now and then, and at once when clients found that it
does not answer; real work counts in its place. A gap
between two readings longer than an interval means that we stood still, not the engine: everything
begins anew, and nobody is blamed.

Source: llama-server builds 10434 and 11434, measured; llama.cpp#27388 for a `/health` that is 200
while nothing is decoded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from pydantic import Field

from proxy.setting_types import SettingsTable

# A stopped process uses no processor at all, one that waits and answers our questions a
# thousandth; one that computes with a single thread on a crowded machine still a good share.
_COMPUTING: Final = 0.05
_TICKS_PER_INTERVAL: Final = 8
# Who asks more often than each second keeps the engine from noticing clients that left.
_ASK_EVERY_S: Final = 2.0


class HealthSettings(SettingsTable):
    """How closely an engine in service is watched."""

    liveness_interval_s: float = Field(
        5,
        ge=1,
        le=3600,
        description="an engine with work in which nothing moves for two of these is replaced",
    )
    idle_probe_s: float = Field(
        60, ge=0, le=86_400, description="an idle engine makes one token this often; 0 for never"
    )
    batch_timeout_s: float = Field(
        300, gt=0, le=86_400, description="time an engine may compute on one batch"
    )

    @property
    def tick_s(self) -> float:
        """Return the time between two readings."""
        return self.liveness_interval_s / _TICKS_PER_INTERVAL

    @property
    def silence_s(self) -> float:
        """Return the stillness seen after which it has lasted for nearly two intervals.

        A tick may pass before a movement is seen and another before its absence is: with these, an
        engine that stops is found within two intervals.
        """
        return 2 * self.liveness_interval_s - 2 * self.tick_s

    @property
    def ask_every_s(self) -> float:
        """Return the time between two questions for the engine's own counters."""
        return min(_ASK_EVERY_S, self.liveness_interval_s / 2)


@dataclass(frozen=True, slots=True)
class CounterSample:
    """What was found out by asking.

    Attributes:
        counters: The engine's counters, in an order of their own; None where it did not answer.
        cpu_s: Processor time the process has used; None where that cannot be told.
    """

    counters: tuple[float, ...] | None = None
    cpu_s: float | None = None


@dataclass(frozen=True, slots=True)
class HealthSample:
    """One engine at one moment.

    Attributes:
        at_s: The moment, monotonic.
        awaited: Requests whose next bytes it owes.
        bytes_seen: Bytes of answers that came from it.
        look: What asking found out; None where nobody asked.
        is_silent: Whether clients' requests were moved away because it did not answer.
    """

    at_s: float
    awaited: int
    bytes_seen: int
    look: CounterSample | None = None
    is_silent: bool = False


@dataclass(frozen=True, slots=True)
class HealthState:
    """What is remembered from reading to reading.

    Attributes:
        last: The reading before.
        sent_at_s: When it last sent something; from then on counts the time without a probe.
        owing_at_s: When it last sent something, or the work began.
        moved_at_s: From when on nothing is known to have moved.
        computed_at_s: From when on it is not known to have computed; at least `moved_at_s`.
        look: The last look since `owing_at_s`, if any, and its time.
    """

    last: HealthSample
    sent_at_s: float
    owing_at_s: float
    moved_at_s: float
    computed_at_s: float
    look: tuple[float, CounterSample] | None = None


class HealthAction(StrEnum):
    """What is to be done after a reading."""

    NOTHING = "nothing"
    LOOK = "look"
    PROBE = "probe"
    WITHDRAW = "withdraw"


def start(reading: HealthSample) -> HealthState:
    """Begin to watch; also anew, after a time nobody watched."""
    now_s = reading.at_s
    return HealthState(reading, now_s, now_s, now_s, now_s)


def update(rules: HealthSettings, health: HealthState, reading: HealthSample) -> HealthState:
    """Take a reading in."""
    now_s = reading.at_s
    if now_s - health.last.at_s > rules.liveness_interval_s:
        return start(reading)
    if reading.bytes_seen != health.last.bytes_seen:
        return start(reading)
    if not reading.awaited:
        return replace(start(reading), sent_at_s=health.sent_at_s)
    if reading.look is None:
        return replace(health, last=reading)
    return _compare(replace(health, last=reading, look=(now_s, reading.look)), health.look)


def _compare(health: HealthState, before: tuple[float, CounterSample] | None) -> HealthState:
    """Hold the newest look against the one before.

    What happened between two looks is dated to the first: it may have ended right after it.
    """
    if before is None or health.look is None:
        return health
    (then_s, then), (now_s, now) = before, health.look
    if _differ(then, now):
        return replace(health, moved_at_s=then_s, computed_at_s=then_s)
    if now.counters is None:
        # Not answering is no movement, and no reason to forget what was answered before.
        health = replace(health, look=(now_s, replace(now, counters=then.counters)))
    if _computed(then, now, now_s - then_s):
        return replace(health, computed_at_s=then_s)
    return health


def _differ(then: CounterSample, now: CounterSample) -> bool:
    return None not in (then.counters, now.counters) and then.counters != now.counters


def _computed(then: CounterSample, now: CounterSample, took_s: float) -> bool:
    if then.cpu_s is None or now.cpu_s is None:
        return False
    return now.cpu_s - then.cpu_s >= _COMPUTING * took_s


def has_moved(before: HealthSample, now: HealthSample) -> bool:
    """Return whether work went on between two readings that both have a look."""
    moved = before.look is not None and now.look is not None and _differ(before.look, now.look)
    return moved or before.bytes_seen != now.bytes_seen


def next_action(rules: HealthSettings, health: HealthState) -> HealthAction:
    """Say what is to be done after the last reading."""
    now_s = health.last.at_s
    if not health.last.awaited:
        is_waited_for = now_s - health.sent_at_s >= rules.idle_probe_s or health.last.is_silent
        is_due = rules.idle_probe_s and is_waited_for
        return HealthAction.PROBE if is_due else HealthAction.NOTHING
    is_at_rest = now_s - health.computed_at_s >= rules.silence_s
    if is_at_rest or now_s - health.moved_at_s >= max(rules.batch_timeout_s, rules.silence_s):
        return HealthAction.WITHDRAW
    is_worth_it = now_s - health.owing_at_s >= rules.liveness_interval_s / 2
    is_time = health.look is None or now_s - health.look[0] >= rules.ask_every_s
    return HealthAction.LOOK if is_worth_it and is_time else HealthAction.NOTHING


def queue_timeout_s(rules: HealthSettings, unhealthy_timeout_s: float, held: int) -> float:
    """Return how long an unhealthy engine has to get well: not long while clients wait for it."""
    return min(unhealthy_timeout_s, rules.liveness_interval_s) if held else unhealthy_timeout_s
