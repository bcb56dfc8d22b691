"""What others may know of an instance."""

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
        name: The instance, such as `chat.0`.
        model: The model it serves a replica of.
        state: Where it is in its life.
        wanted: Whether it was asked to be up.
        run: Number of its latest process, from 1; 0 before the first.
        pid: That process while it lives.
        since_s: Monotonic time at which it entered its state.
        up_s: Seconds since it last became ready; 0 while it is not up.
        restarts: Runs that followed a fault or a restart, since it was made.
        failures: Faults the restart policy remembers.
        retry_in_s: Seconds until it is tried again; None unless it waits for that.
        cause: Why it does not serve, after a fault; None once it serves again.
        warnings: What the engine silently went without, known once it is ready.
        load_progress: Share of loading that is done, 0 to 1; None where the engine does not say.
        endpoint: Where it listens, as far as known.
        api_key: What it wants to be shown.
        log_path: Where its output goes; None before the first run.
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
