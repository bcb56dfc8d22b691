"""Decides when to restart after a failure, and when to give up."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from supervisor.settings.tables import RestartPolicy

# Failures close together add up, old ones fade: an instance that crashes once a week is never given
# up. The delay is drawn between zero and a bound that doubles with the count ("full jitter"), so
# instances that failed together do not restart together. Source: thejerf/suture v4, supervisor.go;
# "Exponential Backoff And Jitter", AWS Architecture Blog.


# A count of failures that halves every `failure_half_life_s`, and its monotonic time in seconds. As
# a whole number it is rounded up: a decayed 4.3 was five failures.
FailureHistory = tuple[float, float]


def decide(
    policy: RestartPolicy,
    history: FailureHistory,
    *,
    now_s: float,
    chance: float,
    can_give_up: bool = True,
) -> tuple[FailureHistory, float | None]:
    """Count a failure; return the new count and the delay before the next start, in seconds.

    The delay is None to give up. `chance`, 0 to 1, spreads the delay. Without `can_give_up` the
    count stays below `max_failures`, which also bounds the delay.
    """
    weight, at_s = history
    decayed = weight * 0.5 ** ((now_s - at_s) / policy.failure_half_life_s)
    weight = decayed + 1 if can_give_up else min(decayed + 1, max(1, policy.max_failures - 1))
    after, failures = (weight, now_s), math.ceil(weight)
    if can_give_up and failures >= policy.max_failures:
        return after, None
    doublings = min(failures - 1, 64)  # 2**64 s is beyond any backoff_max_s
    return after, chance * min(policy.backoff_max_s, policy.backoff_initial_s * 2**doublings)


class RestartTracker:
    """The failures of one instance.

    Crashes that requests may have caused, and waits for an RPC worker, have a separate count that
    never gives up: otherwise a client or another machine could take the model from everyone.
    """

    def __init__(self, policy: RestartPolicy, clock: Callable[[], float]) -> None:
        self.policy = policy
        self.delay_s = 0.0  # before the next start
        self._clock = clock
        self.forget()

    def forget(self) -> None:
        self._histories = dict.fromkeys((False, True), (0.0, 0.0))  # by `by_request`

    @property
    def failures(self) -> int:
        return sum(math.ceil(weight) for weight, _ in self._histories.values())

    def record(self, *, by_request: bool) -> bool:
        """Count a failure; return whether to start again after `delay_s`."""
        chance = random.random()  # noqa: S311 (spreads restarts, not a secret)
        self._histories[by_request], delay_s = decide(
            self.policy,
            self._histories[by_request],
            now_s=self._clock(),
            chance=chance,
            can_give_up=not by_request,
        )
        self.delay_s = delay_s or 0.0
        return delay_s is not None
