"""Decides whether an engine in service is healthy: while it has work, something must progress."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from supervisor.engine.child import ProcessorTime
from supervisor.settings.tables import HealthSettings

# A response proves nothing: llama-server serves `/health`, `/slots` and `/metrics` from threads
# that keep running when decoding hangs. So samples are compared:
#
# 1. bytes of responses, which the proxy counts anyway;
# 2. when these stop, the engine's own counters, read rarely: `n_decode_total` grows with each
#    batch, the token totals only when a request ends;
# 3. during a batch none of these grows, and 2048 tokens take 12 s on a slow CPU. But the time for
#    which threads of the process compute or wait for a processor does: such an engine gets
#    `batch_timeout_s`, another (stopped, or waiting for a lock or a hung device) two intervals. Of
#    the batch's time counts only the share in which its threads do not wait for a processor.
#
# An idle engine generates a token once a minute. In between, the state of its process is read: if
# a signal (SIGSTOP) has suspended it at two readings in a row, it cannot answer.
#
# Source: llama-server builds 10434 and 11434, measured; llama.cpp#27388 (`/health` is 200 while
# decoding hangs); proc(5), state T.

# The share of its time above which a process computes. A stopped process uses none, a process that
# serves our metrics a thousandth. Elsewhere than on Linux, a machine that is twenty times too busy
# looks the same.
_COMPUTING: Final = 0.05
_SUSPENDED_LOOKS: Final = 2
# The most time of waiting for a processor that is left out, in times of the batch's limit.
_STARVED_MAX: Final = 20


# Counters in a fixed order, None if it did not answer; None if the process's times are unknown.
CounterSample = tuple[tuple[float, ...] | None, ProcessorTime | None]


@dataclass(frozen=True, slots=True)
class HealthSample:
    at_s: float  # monotonic
    awaited: int  # requests that wait for its next bytes
    bytes_seen: int  # of responses so far
    counters: CounterSample | None = None  # None if not read this time
    is_silent: bool = False  # whether requests were moved away because it did not answer
    is_suspended: bool | None = None  # whether a signal stopped the process; None if not looked at


@dataclass(frozen=True, slots=True)
class HealthState:
    """Memory between samples; all times are monotonic."""

    last: HealthSample
    sent_at_s: float  # when it last sent bytes; the probe interval counts from here
    owing_at_s: float  # when it last sent bytes, or its work began
    progress_at_s: float  # latest known progress
    computed_at_s: float  # latest known computing; at least progress_at_s
    starved_s: float = 0.0  # of the time since progress_at_s, waiting for a processor
    counters: tuple[float, CounterSample] | None = None  # since owing_at_s, with their time
    looked_at_s: float = 0.0  # when its process was last looked at, or its service began
    suspended: int = 0  # looks in a row that found it suspended


HealthAction = Literal["nothing", "read counters", "look at process", "probe", "withdraw"]


def start(sample: HealthSample) -> HealthState:
    now_s = sample.at_s
    return HealthState(sample, now_s, now_s, now_s, now_s, looked_at_s=now_s)


def update(settings: HealthSettings, health: HealthState, sample: HealthSample) -> HealthState:
    now_s = sample.at_s
    if now_s - health.last.at_s > settings.liveness_interval_s:
        return start(sample)  # this process was suspended, not the engine
    if sample.bytes_seen != health.last.bytes_seen:
        return start(sample)
    if not sample.awaited:
        idle = replace(start(sample), sent_at_s=health.sent_at_s)
        if sample.is_suspended is None:
            return replace(idle, looked_at_s=health.looked_at_s, suspended=health.suspended)
        return replace(idle, suspended=health.suspended + 1 if sample.is_suspended else 0)
    if sample.counters is None:
        return replace(health, last=sample)
    return _compare(
        replace(health, last=sample, counters=(now_s, sample.counters)), health.counters
    )


def _compare(health: HealthState, before: tuple[float, CounterSample] | None) -> HealthState:
    # Progress between two readings is dated to the first: it may have ended right after that.
    if before is None or health.counters is None:
        return health
    (then_s, then), (now_s, now) = before, health.counters
    if _differ(then, now):
        return replace(health, progress_at_s=then_s, computed_at_s=then_s, starved_s=0.0)
    (values, time_before), (answered, time_now) = then, now
    if answered is None:
        # No answer means no progress; the last answer stays valid.
        health = replace(health, counters=(now_s, (values, time_now)))
    if time_before is None or time_now is None:
        return health
    waited_s = max(0.0, time_now.waited_s - time_before.waited_s)  # of threads that still run
    runnable_s = time_now.used_s - time_before.used_s + waited_s
    if runnable_s < _COMPUTING * (now_s - then_s):
        return health
    starved_s = health.starved_s + (now_s - then_s) * waited_s / runnable_s
    return replace(health, computed_at_s=then_s, starved_s=starved_s)


def _differ(then: CounterSample, now: CounterSample) -> bool:
    return None not in (then[0], now[0]) and then[0] != now[0]


def has_moved(before: HealthSample, now: HealthSample) -> bool:
    """Return whether work progressed between two samples, both with counters."""
    if before.counters and now.counters and _differ(before.counters, now.counters):
        return True
    return before.bytes_seen != now.bytes_seen


def next_action(settings: HealthSettings, health: HealthState) -> HealthAction:
    now_s = health.last.at_s
    if not health.last.awaited:
        return _next_idle_action(settings, health)
    is_at_rest = now_s - health.computed_at_s >= settings.silence_s
    batch_s = max(settings.batch_timeout_s, settings.silence_s)
    starved_s = min(health.starved_s, _STARVED_MAX * batch_s)
    if is_at_rest or now_s - health.progress_at_s - starved_s >= batch_s:
        return "withdraw"
    is_worth_it = now_s - health.owing_at_s >= settings.liveness_interval_s / 2
    is_due = health.counters is None or now_s - health.counters[0] >= settings.counters_every_s
    return "read counters" if is_worth_it and is_due else "nothing"


def _next_idle_action(settings: HealthSettings, health: HealthState) -> HealthAction:
    now_s = health.last.at_s
    if health.suspended >= _SUSPENDED_LOOKS:
        return "withdraw"
    is_due = now_s - health.sent_at_s >= settings.idle_probe_s or health.last.is_silent
    if settings.idle_probe_s and is_due:
        return "probe"
    is_due = now_s - health.looked_at_s >= settings.liveness_interval_s
    return "look at process" if is_due else "nothing"


def recovery_timeout_s(
    settings: HealthSettings, unhealthy_timeout_s: float, *, is_urgent: bool
) -> float:
    """Return how long it may take to recover; urgent if requests wait or it is suspended."""
    urgent_s = min(unhealthy_timeout_s, settings.liveness_interval_s)
    return urgent_s if is_urgent else unhealthy_timeout_s
