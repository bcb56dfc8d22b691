"""The public view of an instance."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from supervisor.engine_client.endpoint import Endpoint
from supervisor.instance.states import State
from supervisor.process.exit_cause import FailureCause, StartWarning


@dataclass(frozen=True, slots=True)
class InstanceSnapshot:
    """One instance at one moment."""

    name: str  # such as chat.0
    model: str
    state: State
    wanted: bool  # whether the last command was to run it
    run: int  # the number of its latest process, from 1; 0 before the first
    pid: int | None
    since_s: float  # the monotonic time at which it entered its state
    up_s: float  # since it became ready; 0 while it is not up
    restarts: int  # runs after the first that were neither started by command nor measured
    failures: int  # the decaying count of the restart policy
    retry_in_s: float | None  # until the next start; None unless in BACKOFF
    cause: FailureCause | None  # the latest failure; None once it serves again
    warnings: tuple[StartWarning, ...]  # known once it is ready
    load_progress: float | None  # 0 to 1; None where the build does not report it
    endpoint: Endpoint
    api_key: str = field(repr=False)
    log_path: Path | None
