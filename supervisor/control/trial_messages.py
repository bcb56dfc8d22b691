"""The JSON of the daemon and its commands about trials and canaries."""

from __future__ import annotations

from typing import Literal, TypedDict

from supervisor.errors import ErrorFields


class TrialNote(TypedDict):
    """A trial in a model's status; `instance` runs `profile` for this share of conversations.

    `is_canary`: it tries an engine and is not in the settings.
    """

    profile: str
    is_canary: bool
    share: float
    instance: str


class TrialSideStatus(TypedDict):
    """One side of a trial; figures are medians of requests, `memory_bytes` is of one instance."""

    profile: str
    instances: list[str]
    conversations: int
    requests: int
    errors: int
    crashes: int
    tokens_per_second: float | None
    first_token_s: float | None
    memory_bytes: int | None


class TrialComparison(TypedDict):
    """The trial over the model's own profile: a ratio, and its interval of 95 %.

    `requests_to_go`: of both sides, until a difference of 5 % would show; None if not known.
    """

    ratio: float | None
    low: float | None
    high: float | None
    is_different: bool
    outcome: str
    requests_to_go: int | None


class FlagDifference(TypedDict):
    """An option that both sides have with other values; None: it does not have it."""

    flag: str
    base: str | None
    trial: str | None


class TrialStatus(TypedDict):
    """The trial of one model; `state` is that of its instance, which serves if it is `ready`."""

    model: str
    share: float
    state: str
    error: ErrorFields | None
    age_s: float
    base: TrialSideStatus
    trial: TrialSideStatus
    tokens_per_second: TrialComparison
    first_token_s: TrialComparison
    differences: list[FlagDifference]
    notes: list[str]


class CanaryStatus(TypedDict):
    """A canary that runs; `trial` are its figures, None while the daemon has none.

    `decides_in_s`: None where a command decides; `obstacle`: why it was not promoted by itself.
    """

    model: str
    engine: str
    own_engine: str | None
    share: float
    margin: float
    decides_in_s: float | None
    obstacle: str | None
    trial: TrialStatus | None


class EndedCanaryStatus(TypedDict):
    """A canary that was promoted or withdrawn; `at` is ISO 8601 in UTC."""

    model: str
    engine: str
    outcome: Literal["promoted", "withdrawn"]
    reason: str
    at: str


class CanariesStatus(TypedDict):
    """`ended`: the latest 16, the latest last."""

    running: list[CanaryStatus]
    ended: list[EndedCanaryStatus]
