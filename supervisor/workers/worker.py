"""One worker on this machine, started again whenever it ends.

It is asked what it offers until it answers once, or an engine has connected, which keeps our
question out. From then on it is ready as long as its process lives: a question would keep the
engine out that uses it.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from supervisor.engines.discover import Device
from supervisor.errors import CorralError
from supervisor.events import Emit
from supervisor.instance.backoff import RestartPolicy, RestartTracker
from supervisor.process import exit_cause
from supervisor.process.child import Exit
from supervisor.process.exit_cause import FailureCause
from supervisor.process.launch import Launch
from supervisor.process.run import ProcessRun, run_to_exit
from supervisor.workers.address import WorkerAddress, check_port
from supervisor.workers.exit_reason import exit_reason, never_listened, not_listening

WorkerState = Literal["starting", "ready", "backoff", "failed"]

_FIRST_PROBE_S: Final = 0.05
_LAST_PROBE_S: Final = 1.0
# It listens after milliseconds; drivers of many devices take seconds.
_START_LIMIT_S: Final = 30.0
_LINES_TO_JUDGE: Final = 100
# Source: ggml-rpc.cpp, ggml_backend_rpc_start_server.
_ACCEPTED: Final = "Accepted client connection"


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """One worker of this machine at one moment.

    Attributes:
        devices: Those that it offered last; none if an engine was connected before it was asked.
        cause: Why it last ended; None while it is ready.
    """

    address: WorkerAddress
    state: WorkerState
    pid: int | None
    restarts: int
    devices: tuple[Device, ...]
    cause: FailureCause | None
    log_path: Path | None


class Worker:
    """One `ggml-rpc-server`.

    Args:
        make_launch: Returns the launch of a run, in a thread; may raise CorralError.
        probe: Asks it for its devices, in a thread; raises WorkerUnreachable.
        on_end: Called when its process has ended; an engine may have used it before it answered us.
    """

    def __init__(
        self,
        address: WorkerAddress,
        make_launch: Callable[[], Launch],
        probe: Callable[[], tuple[Device, ...]],
        policy: RestartPolicy,
        emit: Emit,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self.address = address
        self._on_end = on_end
        self._make_launch = make_launch
        self._probe = probe
        self._emit: Emit = functools.partial(emit, worker=address.name)
        self._tracker = RestartTracker(policy, time.monotonic)
        self._run: ProcessRun | None = None
        self._runs = 0
        self._ready_at_s: float | None = None
        self._settled = asyncio.Event()
        self._snapshot = WorkerSnapshot(address, "starting", None, 0, (), None, None)

    def snapshot(self) -> WorkerSnapshot:
        pid = self._run.pid if self._run else None
        found = replace(self._snapshot, pid=pid, restarts=max(0, self._runs - 1))
        if found.state == "starting" and self._has_accepted:
            return replace(found, state="ready", cause=None)
        return found

    @property
    def _has_accepted(self) -> bool:
        """Whether it has accepted a connection: ours, or that of an engine."""
        run = self._run
        return bool(run and run.pid and _ACCEPTED in run.last_lines(_LINES_TO_JUDGE))

    @property
    def is_used(self) -> bool:
        """Whether an engine is connected, by the last line that it wrote."""
        last = self._run.last_lines(1) if self._run and self._run.pid else ()
        return last == (_ACCEPTED,)

    async def settled(self) -> WorkerSnapshot:
        """Wait until it is ready, or its first start has failed."""
        await self._settled.wait()
        return self.snapshot()

    async def serve(self) -> None:
        """Run it until cancelled, then kill it; return where a restart is useless."""
        while True:
            end, cause = await self._run_once()
            if not self._note_end(end, cause):
                return
            await asyncio.sleep(self._tracker.delay_s)
            self._snapshot = replace(self._snapshot, state="starting")

    async def _run_once(self) -> tuple[Exit | None, FailureCause]:
        self._runs, self._ready_at_s = self._runs + 1, None
        try:
            check_port(self.address)
            launch = await asyncio.to_thread(self._make_launch)
        except OSError as error:
            return None, not_listening(self.address, error)
        except CorralError as error:
            return None, exit_cause.not_launchable(error)
        run = ProcessRun(self._runs, launch, clock=time.monotonic, on_progress=lambda _: None)
        self._run = run
        self._snapshot = replace(self._snapshot, log_path=launch.log_path)
        return await self._watch(run)

    async def _watch(self, run: ProcessRun) -> tuple[Exit | None, FailureCause]:
        """Wait for the end of a run, which must answer in time."""
        async with asyncio.TaskGroup() as group:
            process = group.create_task(run_to_exit(lambda: run))
            ready = group.create_task(self._wait_ready(run))
            await asyncio.wait({process, ready}, return_when=asyncio.FIRST_COMPLETED)
            is_silent = ready.done() and not ready.result()
            if is_silent:
                process.cancel()
            await asyncio.wait({process})
            ready.cancel()
        if is_silent:
            return None, never_listened(_START_LIMIT_S)
        end = process.result()
        if isinstance(end, FailureCause):
            return None, end
        return end, exit_reason(end, run.last_lines(_LINES_TO_JUDGE))

    async def _wait_ready(self, run: ProcessRun) -> bool:
        """Ask it until it answers; return whether it does within the limit."""
        pause_s = _FIRST_PROBE_S
        with suppress(TimeoutError):
            async with asyncio.timeout(_START_LIMIT_S):
                while True:
                    await asyncio.sleep(pause_s)
                    devices = await self._ask()
                    # An engine that is connected already keeps our question out.
                    if run.pid is not None and (devices or self._has_accepted):
                        self._note_ready(run.pid, devices)
                        return True
                    pause_s = min(2 * pause_s, _LAST_PROBE_S)
        return False

    async def _ask(self) -> tuple[Device, ...]:
        with suppress(CorralError):
            return await asyncio.to_thread(self._probe)
        return ()

    def _note_ready(self, pid: int, devices: tuple[Device, ...]) -> None:
        self._ready_at_s = time.monotonic()
        devices = devices or self._snapshot.devices
        self._snapshot = replace(self._snapshot, state="ready", devices=devices, cause=None)
        offered = ", ".join(f"{one.name} {one.total_mib} MiB" for one in devices) or None
        self._emit("worker.ready", address=str(self.address), pid=pid, devices=offered)
        self._settled.set()

    def _note_end(self, end: Exit | None, cause: FailureCause) -> bool:
        """Note why it ended; return whether to start it again."""
        # As if a request had ended it: engines wait for a worker, so it is never given up for that.
        self._tracker.record(by_request=True)
        up_s = time.monotonic() - self._ready_at_s if self._ready_at_s else 0.0
        self._emit(
            "worker.exited",
            code=end.code if end else None,
            signal=end.signal if end else None,
            up_s=round(up_s, 3),
            reason=cause.sentence,
            retry_in_s=None if cause.permanent else round(self._tracker.delay_s, 3),
        )
        state: WorkerState = "failed" if cause.permanent else "backoff"
        self._snapshot = replace(self._snapshot, state=state, cause=cause)
        if cause.permanent:
            log = str(self._snapshot.log_path) if self._snapshot.log_path else None
            self._emit("worker.failed", reason=cause.sentence, hint=cause.hint, log=log)
        self._settled.set()
        self._on_end()
        return not cause.permanent
