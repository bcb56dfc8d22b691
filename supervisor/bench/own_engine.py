"""Runs engines of a command's own, to measure them beside a daemon or without one.

Each has a random key and a socket in a private directory. It dies with this process: by its stdin,
by the parent-death signal, or, should both fail, when the next such directory is made. Nothing is
saved for it or restored into it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from supervisor.engine.calibration import ThreadCalibrator
from supervisor.engine.child import Exit
from supervisor.engine.client import Endpoint, EngineClient, EngineUnreachable
from supervisor.engine.exit_cause import FailureCause, diagnose, known_cause
from supervisor.engine.launch import Launch, clean_environment, process_tag
from supervisor.engine.orphans import private_runtime
from supervisor.engine.run import ProcessRun, run_to_exit
from supervisor.engine.state_tasks import wait_healthy
from supervisor.engine.warmup import warm
from supervisor.errors import CorralError, EngineFailed, SettingsInvalid, StartFailed
from supervisor.fleet.planner import LaunchPlanner
from supervisor.output import ProgressMeter
from supervisor.plan.auto import COUNTS_MAX
from supervisor.plan.plan import Plan, unix_sockets
from supervisor.settings.tables import InstanceLimits
from supervisor.system.paths import Directories, make_private
from supervisor.system.processor_load import read_this_processor

_NAME: Final = "engine"
_LOG: Final = "private-engines.log"
_LOOPBACK: Final = "127.0.0.1"
_PROC: Final = Path("/proc")
_LINES_TO_JUDGE: Final = 300
# From a broken connection until we see that its process has exited.
_EXIT_SEEN_S: Final = 1.0

_Process = asyncio.Task[Exit | FailureCause]


class PrivateInstance:
    """A ready engine; `ready_s` is from its spawning to its first token or vector."""

    def __init__(self, run: ProcessRun, pid: int, ready_s: float) -> None:
        self._run = run
        self.pid = pid
        self.ready_s = ready_s

    def client(self) -> EngineClient:
        """Make a client, an async context manager, with at most eight connections."""
        return self._run.client()

    def cpu_s(self) -> float | None:
        return self._run.cpu_s()

    def peak_memory_bytes(self) -> int | None:
        """Return the peak resident memory, or None if unknown. Source: proc(5), VmHWM."""
        try:
            lines = (_PROC / str(self.pid) / "status").read_text("ascii", "replace").splitlines()
        except OSError:
            return None
        found = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
        return int(found[0]) * 1024 if found else None


@asynccontextmanager
async def private_instance(plan: Plan, directories: Directories) -> AsyncIterator[PrivateInstance]:
    """Start an engine for the block; call it on the main thread.

    Raises StartFailed, EngineFailed if it ended within the block, which therefore got
    EngineUnreachable, or AccessDenied if a directory or its log cannot be used.
    """
    failure: Exception | None = None
    with private_runtime(directories) as runtime:
        launch = _launch(plan, directories.replace(runtime=runtime))
        run = ProcessRun(1, launch, clock=time.monotonic, on_progress=lambda _: None)
        # The block's errors are raised after the group, so that no exception group wraps them.
        async with asyncio.TaskGroup() as group:
            process = group.create_task(run_to_exit(lambda: run))
            try:
                yield await _ready(plan.model, run, process)
            except EngineUnreachable as error:
                failure = await _explain(error, plan.model, run, process)
            except Exception as error:  # noqa: BLE001 (raised below)
                failure = error
            finally:
                process.cancel()
    if failure:
        raise failure


@asynccontextmanager
async def private_client(plan: Plan, directories: Directories) -> AsyncIterator[EngineClient]:
    """Start an engine like `private_instance`, and open its client for the block."""
    async with private_instance(plan, directories) as instance, instance.client() as client:
        yield client


def _launch(plan: Plan, directories: Directories) -> Launch:
    if any(worker.address.endswith(":0") for worker in plan.workers):
        raise SettingsInvalid(
            f"{plan.model} uses workers with local = true, which only the daemon runs",
            hint="run them by `corral worker`, and set their addresses",
        )
    socket = directories.engine_socket(_NAME) if unix_sockets(plan.engine) else None
    host, port = (str(socket), None) if socket else (_LOOPBACK, 0)
    argv = plan.argv(host=host, port=port)
    api_key = secrets.token_hex(16)
    return Launch(
        argv=argv,
        env=clean_environment(
            os.environ,
            program=plan.engine.path,
            library_dirs=plan.engine.library_dirs,
            api_key=api_key,
            marker=process_tag(directories.runtime, _NAME, argv[0]),
        ),
        cwd=plan.engine.path.parent,
        endpoint=Endpoint(socket=socket, host=_LOOPBACK, port=0),
        api_key=api_key,
        log_path=make_private(directories.log) / _LOG,
    )


async def _ready(model: str, run: ProcessRun, process: _Process) -> PrivateInstance:
    spawned_at_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        ready = group.create_task(_become_ready(run))
        await _wait_loading(run, ready, process)
        is_ready = ready.done() and ready.result()
        ready.cancel()
    if is_ready and run.pid is not None:
        run.stop_parsing()
        return PrivateInstance(run, run.pid, time.monotonic() - spawned_at_s)
    silent_s = round(time.monotonic() - run.alive_at_s, 1)
    cause = await _cause_of_end(run, process) or known_cause("unresponsive", silent_s=silent_s)
    raise _start_error(StartFailed, model, cause, run)


async def _become_ready(run: ProcessRun) -> bool:
    await wait_healthy(run)
    async with run.client() as client:
        return await warm(client) != "failed"


async def _wait_loading(run: ProcessRun, ready: asyncio.Task[bool], process: _Process) -> None:
    """Wait until it is ready, has ended, or has been silent for too long."""
    limit_s = InstanceLimits().load_timeout_s
    while (left_s := run.alive_at_s + limit_s - time.monotonic()) > 0:
        done, _ = await asyncio.wait(
            {ready, process}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
        )
        if done:
            return


async def _explain(
    error: EngineUnreachable, model: str, run: ProcessRun, process: _Process
) -> Exception:
    cause = await _cause_of_end(run, process)
    if cause is None:
        return error
    failed = _start_error(EngineFailed, model, cause, run)
    failed.__cause__ = error
    return failed


async def _cause_of_end(run: ProcessRun, process: _Process) -> FailureCause | None:
    await asyncio.wait({process}, timeout=_EXIT_SEEN_S)
    if not process.done() or process.cancelled():
        return None
    end = process.result()
    if isinstance(end, FailureCause):
        return end
    return diagnose(end.returncode, run.last_lines(_LINES_TO_JUDGE))


def _start_error(
    kind: type[CorralError], model: str, cause: FailureCause, run: ProcessRun
) -> CorralError:
    return kind(f"{model}: {cause.sentence}", hint=cause.hint, log=str(run.launch.log_path))


def measure_threads(planner: LaunchPlanner, model: str, directories: Directories) -> None:
    """Measure threads until the next plan has a daemon's count; skip a model that does not run."""
    plan = planner.plan(model)
    if plan.untried_threads is None:
        return
    with ProgressMeter() as meter, suppress(StartFailed, EngineFailed):
        meter.show(model, 0, "measuring how many threads are fastest, once for this model")
        asyncio.run(_measure(planner, plan, directories))


async def _measure(planner: LaunchPlanner, plan: Plan, directories: Directories) -> None:
    for _ in range(COUNTS_MAX):
        if plan.untried_threads is None:
            return
        async with private_instance(plan, directories) as instance, instance.client() as client:
            calibrator = ThreadCalibrator(
                plan=partial(lambda plan: plan, plan),
                plan_again=partial(planner.plan, plan.model),
                store=lambda plan: planner.measurements(plan.gguf.path, plan.engine),
                is_alone=lambda: True,
                read=partial(read_this_processor, [os.getpid(), instance.pid]),
                emit=lambda *_, **__: None,
            )
            if not await calibrator.needs_restart(client, 1):
                return
        plan = planner.plan(plan.model)
