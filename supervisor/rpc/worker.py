"""One `ggml-rpc-server` on this machine: its program, its launch, its restarts and its exit causes.

The worker is started again whenever it ends. It is probed until it has answered once, or until an
engine has connected, which keeps our probe out. From then on it counts as ready as long as its
process lives: a probe would keep out the engine that uses it.
"""

from __future__ import annotations

import asyncio
import functools
import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from supervisor.builds.discover import Device, Engine
from supervisor.builds.probe import run_program
from supervisor.engine import exit_cause
from supervisor.engine.backoff import RestartTracker
from supervisor.engine.child import Exit
from supervisor.engine.client import Endpoint
from supervisor.engine.exit_cause import FailureCause, find_causes, known_cause, signal_name
from supervisor.engine.launch import Launch, clean_environment, process_tag
from supervisor.engine.run import ProcessRun, run_to_exit
from supervisor.errors import CorralError, EngineBroken, EngineMissing
from supervisor.events import Emit
from supervisor.rpc.address import WorkerAddress, check_port
from supervisor.settings.tables import RestartPolicy
from supervisor.system.paths import Directories, make_ours, make_private


def exit_reason(end: Exit, lines: Sequence[str]) -> FailureCause:
    """Find the cause in the last lines of output, oldest first."""
    how = f"ended with code {end.code}"
    if end.signal is not None:
        how = f"was ended by {signal_name(end.signal)}"
    return next(find_causes("worker", lines), None) or known_cause("worker_exited", how=how)


# The present name first. Source: llama.cpp, tools/rpc/CMakeLists.txt, and its history.
_NAMES: Final = ("ggml-rpc-server", "rpc-server", "llama-rpc-server")
_LIMIT_S: Final = 20.0
_OPTION: Final = re.compile(r"--[a-z]+")
_MIB: Final = 1024**2


# The path of a program that serves RPC, and the options that its help lists.
WorkerProgram = tuple[Path, frozenset[str]]


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Options of a worker; None and False leave the program's own default."""

    host: str
    port: int
    threads: int | None = None
    device: str | None = None
    cache: bool = False
    memory_bytes: int | None = None


def find(engine: Engine) -> WorkerProgram:
    """Find the program beside an engine, and read its help. Raises EngineMissing, EngineBroken."""
    found = [path for name in _NAMES if (path := engine.path.with_name(name)).is_file()]
    if not found:
        raise EngineMissing(
            f"the engine {engine.path} has no {_NAMES[0]} beside it",
            hint='pip install ".[engine]" in the clone has one; a build of llama.cpp needs '
            "-DGGML_RPC=ON",
        )
    return found[0], frozenset(_OPTION.findall(_help(found[0], engine.library_dirs)))


def command(
    program: WorkerProgram, options: WorkerOptions
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return a command line, and a clause for each option that this build does not have."""
    path, names = program
    memory_mib = options.memory_bytes and options.memory_bytes // _MIB
    wanted = {"--host": options.host, "--port": options.port, "--threads": options.threads}
    wanted |= {"--device": options.device, "--mem": memory_mib}
    words = [[name, str(value)] for name, value in wanted.items() if value]
    words += [["--cache"]] if options.cache else []
    known = (word for option in words if option[0] in names for word in option)
    dropped = (name for name, *_ in words if name not in names)
    return (
        (str(path), *known),
        tuple(f"this build's {path.name} has no {name}" for name in dropped),
    )


def _help(path: Path, library_dirs: tuple[Path, ...]) -> str:
    done = run_program([str(path), "--help"], library_dirs, _LIMIT_S)
    text = (done.stdout + done.stderr).decode("utf-8", "replace")
    if "--host" not in text or "--port" not in text:
        raise EngineBroken(
            f"{path} runs, but its --help is not that of ggml-rpc-server",
            hint="set engine to a llama-server with its own ggml-rpc-server beside it",
        )
    return text


# Names of models and workers have no tilde, so neither logs nor tags clash with those of instances.
_NAME: Final = "worker~{}"


def worker_launch(
    engine: Engine, name: str, options: WorkerOptions, directories: Directories
) -> tuple[Launch, tuple[str, ...]]:
    """Make the launch of a worker, and a clause for each option that the build does not have.

    Runs the program's help. Raises EngineMissing, EngineBroken, and AccessDenied for a directory.
    """
    program = find(engine)
    path, (argv, dropped) = program[0], command(program, options)
    label = _NAME.format(name)
    tensors = make_private(make_ours(directories.cache) / "workers")
    env = clean_environment(
        os.environ,
        program=path,
        library_dirs=engine.library_dirs,
        api_key="",
        marker=process_tag(directories.runtime, label, argv[0]),
    )
    launch = Launch(
        argv=argv,
        # With --cache, tensors are in the directory `rpc` there. Source: tools/rpc/rpc-server.cpp.
        env={**env, "LLAMA_CACHE": str(tensors)},
        cwd=path.parent,
        endpoint=Endpoint(host=options.host, port=options.port),
        api_key="",
        log_path=make_private(directories.log) / f"{label}.log",
    )
    return launch, dropped


WorkerState = Literal["starting", "ready", "backoff", "failed"]

_FIRST_PROBE_S: Final = 0.05
_LAST_PROBE_S: Final = 1.0
# It listens after milliseconds; drivers of many devices take seconds.
_START_LIMIT_S: Final = 30.0
_LINES_TO_JUDGE: Final = 100
# Source: ggml-rpc.cpp, ggml_backend_rpc_start_server.
_ACCEPTED: Final = "Accepted client connection"


class Worker:
    """One `ggml-rpc-server`.

    `devices` are those of its last answer; none if an engine connected before the first probe.
    `cause` is that of its last end; None while it is ready.

    Args:
        make_launch: Returns the launch of a run, in a thread; may raise CorralError.
        probe: Reads its devices, in a thread; raises WorkerUnreachable.
        on_end: Called when its process has ended, even if it never answered a probe: an engine may
            have used it.
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
        self.devices: tuple[Device, ...] = ()
        self.cause: FailureCause | None = None
        self.log_path: Path | None = None
        self._on_end = on_end
        self._make_launch = make_launch
        self._probe = probe
        self._emit: Emit = functools.partial(emit, worker=address.name)
        self._tracker = RestartTracker(policy, time.monotonic)
        self._run: ProcessRun | None = None
        self._runs = 0
        self._ready_at_s: float | None = None
        self._settled = asyncio.Event()
        self._state: WorkerState = "starting"

    @property
    def state(self) -> WorkerState:
        return "ready" if self._state == "starting" and self._has_accepted else self._state

    @property
    def pid(self) -> int | None:
        return self._run.pid if self._run else None

    @property
    def restarts(self) -> int:
        return max(0, self._runs - 1)

    @property
    def _has_accepted(self) -> bool:
        """Whether it has accepted a connection, ours or an engine's."""
        run = self._run
        return bool(run and run.pid and _ACCEPTED in run.last_lines(_LINES_TO_JUDGE))

    @property
    def is_used(self) -> bool:
        """Whether an engine is connected, according to the last line of its output."""
        last = self._run.last_lines(1) if self._run and self._run.pid else ()
        return last == (_ACCEPTED,)

    async def wait_settled(self) -> None:
        """Wait until it is ready, or its first start has failed."""
        await self._settled.wait()

    async def serve(self) -> None:
        """Run it until cancelled, then kill it; return if a restart is useless."""
        while True:
            end, cause = await self._run_once()
            if not self._note_end(end, cause):
                return
            await asyncio.sleep(self._tracker.delay_s)
            self._state = "starting"

    async def _run_once(self) -> tuple[Exit | None, FailureCause]:
        self._runs, self._ready_at_s = self._runs + 1, None
        try:
            check_port(self.address)
            launch = await asyncio.to_thread(self._make_launch)
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            return None, known_cause("worker_not_listening", address=self.address, reason=reason)
        except CorralError as error:
            return None, exit_cause.not_launchable(error)
        run = ProcessRun(self._runs, launch, clock=time.monotonic, on_progress=lambda _: None)
        self._run, self.log_path = run, launch.log_path
        # End the run if it does not answer in time.
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
            return None, known_cause("worker_silent", limit_s=_START_LIMIT_S)
        end = process.result()
        if isinstance(end, FailureCause):
            return None, end
        return end, exit_reason(end, run.last_lines(_LINES_TO_JUDGE))

    async def _wait_ready(self, run: ProcessRun) -> bool:
        """Probe it until it answers; return whether it does within the limit."""
        pause_s = _FIRST_PROBE_S
        with suppress(TimeoutError):
            async with asyncio.timeout(_START_LIMIT_S):
                while True:
                    await asyncio.sleep(pause_s)
                    devices: tuple[Device, ...] = ()
                    with suppress(CorralError):
                        devices = await asyncio.to_thread(self._probe)
                    # An engine that is connected already keeps our probe out.
                    if run.pid is not None and (devices or self._has_accepted):
                        self._note_ready(run.pid, devices)
                        return True
                    pause_s = min(2 * pause_s, _LAST_PROBE_S)
        return False

    def _note_ready(self, pid: int, devices: tuple[Device, ...]) -> None:
        self._ready_at_s = time.monotonic()
        self._state, self.cause, self.devices = "ready", None, devices or self.devices
        shown = (f"{device.name} {device.total_mib} MiB" for device in self.devices)
        offered = ", ".join(shown) or None
        self._emit("worker.ready", address=str(self.address), pid=pid, devices=offered)
        self._settled.set()

    def _note_end(self, end: Exit | None, cause: FailureCause) -> bool:
        """Note its end; return whether to start it again."""
        # Counted as if a request had ended it, so that it is never given up: engines wait for it.
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
        self._state, self.cause = "failed" if cause.permanent else "backoff", cause
        if cause.permanent:
            log = str(self.log_path) if self.log_path else None
            self._emit("worker.failed", reason=cause.sentence, hint=cause.hint, log=log)
        self._settled.set()
        self._on_end()
        return not cause.permanent
