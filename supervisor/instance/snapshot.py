"""The public view of an instance."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from supervisor.engine_client.endpoint import Endpoint
from supervisor.instance.states import State
from supervisor.process.exit_cause import FailureCause, StartWarning


@dataclass(frozen=True, slots=True)
class InstanceSnapshot:
    """One instance at one moment.

    Attributes:
        name: Such as `chat.0`.
        wanted: Whether the last command asked for it to run.
        run: The number of its latest process, from 1; 0 before the first.
        since_s: The monotonic time at which it entered its state.
        up_s: The time since it became ready; 0 while it is not up.
        restarts: Runs after the first that were not a start by command.
        failures: The decaying count of the restart policy.
        retry_in_s: The time until the next start; None unless in BACKOFF.
        cause: The latest failure; None once it serves again.
        warnings: What the engine silently does without, known once it is ready.
        load_progress: 0 to 1; None where the build does not report it.
        log_path: None before the first run.
    """

    name: str
    model: str
    state: State
    wanted: bool
    run: int
    pid: int | None
    since_s: float
    up_s: float
    restarts: int
    failures: int
    retry_in_s: float | None
    cause: FailureCause | None
    warnings: tuple[StartWarning, ...]
    load_progress: float | None
    endpoint: Endpoint
    api_key: str = field(repr=False)
    log_path: Path | None
