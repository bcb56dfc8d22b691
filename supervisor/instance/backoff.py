"""Decides when to try again, and when to stop trying. No clock, no randomness of its own.

Each fault adds one to a memory that halves every `failure_half_life_s`: faults close together add
up, old ones fade, and an instance that crashes once a week never meets the breaker. The wait before
the next try is drawn from zero to a bound that doubles with the remembered faults ("full jitter"),
so that instances which fell together do not rise together.

Source: the fading memory is that of suture (thejerf/suture v4, supervisor.go); full jitter is from
"Exponential Backoff And Jitter", AWS Architecture Blog.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import Field

from proxy.setting_types import SettingsTable


class RestartPolicy(SettingsTable):
    """`[supervisor.restart]`: how patiently instances are tried again after a fault."""

    backoff_initial_s: float = Field(
        0.5, gt=0, le=3600, description="longest wait after the first fault; doubles with each"
    )
    backoff_max_s: float = Field(60, gt=0, le=86_400, description="longest wait ever")
    max_failures: int = Field(
        5, ge=1, le=1000, description="faults close together after which it is given up"
    )
    failure_half_life_s: float = Field(
        300, gt=0, le=604_800, description="time in which the memory of faults halves"
    )


@dataclass(frozen=True, slots=True)
class FailureHistory:
    """What is remembered of an instance's faults; `FailureHistory()` is forgiveness.

    Attributes:
        weight: Faults remembered, faded; 0 and up.
        at_s: Monotonic time at which `weight` was true, in seconds.
    """

    weight: float = 0.0
    at_s: float = 0.0

    @property
    def failures(self) -> int:
        """Return the remembered faults as a whole number: 4.3 faded faults were five."""
        return math.ceil(self.weight)


@dataclass(frozen=True, slots=True)
class RestartDecision:
    """What follows from a fault.

    Attributes:
        memory: What to remember from now on.
        delay_s: Seconds to wait before the next run, or None: the breaker is open, do not try.
    """

    memory: FailureHistory
    delay_s: float | None


def judge(
    policy: RestartPolicy,
    memory: FailureHistory,
    *,
    now_s: float,
    chance: float,
    can_give_up: bool = True,
) -> RestartDecision:
    """Judge one more fault.

    Args:
        policy: How patient to be.
        memory: What was remembered so far.
        now_s: Monotonic time of the fault, in seconds.
        chance: A number drawn evenly from 0 to 1, which spreads the delay.
        can_give_up: Whether the breaker may open. Where not, the memory stays below it, and with it
            the wait.
    """
    faded = memory.weight * 0.5 ** ((now_s - memory.at_s) / policy.failure_half_life_s)
    weight = faded + 1 if can_give_up else min(faded + 1, max(1, policy.max_failures - 1))
    after = FailureHistory(weight, now_s)
    if can_give_up and after.failures >= policy.max_failures:
        return RestartDecision(after, None)
    # 2**64 would overflow nothing yet, and no cap is that far away.
    doublings = min(after.failures - 1, 64)
    return RestartDecision(
        after, chance * min(policy.backoff_max_s, policy.backoff_initial_s * 2**doublings)
    )
