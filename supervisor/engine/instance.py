"""One instance: acts on the decisions of `states.py`.

All state changes happen in `_apply`, which has no `await`. Entering a state cancels the timer and
the task of the state before. Another task holds the process of a run from spawn to exit, across
states, and applies EXITED at its end.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from proxy.common.background_tasks import FAILURES, persist
from proxy.router.lease import ProcessExit
from proxy.upstream.upstream import Timings
from supervisor.engine import exit_cause, state_tasks, states
from supervisor.engine.backoff import RestartTracker
from supervisor.engine.child import Exit
from supervisor.engine.client import Endpoint, ErrorResponse
from supervisor.engine.exit_cause import FailureCause
from supervisor.engine.health import recovery_timeout_s
from supervisor.engine.launch import Launch, Progress
from supervisor.engine.prompts import WarmPrompt
from supervisor.engine.run import ProcessRun, run_to_exit
from supervisor.engine.states import Event, InstanceSnapshot, Lifecycle, State
from supervisor.engine.warmup import PrefillQueue
from supervisor.errors import CorralError
from supervisor.events import Emit
from supervisor.settings.tables import InstanceLimits, RestartPolicy

if TYPE_CHECKING:
    from proxy.router.router import Router


def emit_prefill(emit: Emit, run: int, prompt: WarmPrompt, found: Timings | ErrorResponse) -> None:
    if isinstance(found, ErrorResponse):
        reason = found.message or f"status {found.status}"
        emit("prompt.rejected", run=run, prompt=prompt.name, reason=reason)
    else:
        tokens, cached = found.prompt_tokens, found.cached_tokens
        emit("prompt.prefilled", run=run, prompt=prompt.name, tokens=tokens, cached=cached)


# Enough for a failed start with its help text, or for an abort with its backtrace.
_LINES_TO_JUDGE = 300
# A deadline noticed this late was missed because the daemon or the machine was suspended.
_LATE_S = 1.0
_LOADING = frozenset({State.STARTING, State.WARMING})


@dataclass(frozen=True, slots=True)
class InstanceServices:
    """The collaborators of an instance."""

    # Returns the launch of a run, by its number; may raise CorralError.
    launch: Callable[[int], Launch]
    traffic: Router
    admit: Callable[[InstanceSnapshot], None]  # called when it can serve
    emit: Emit
    persister: state_tasks.SlotPersister  # saves and restores its KV slots
    needs_restart: state_tasks.NeedsRestart
    # Awaited before each launch; may raise CorralError.
    prepare: Callable[[], Awaitable[None]]
    # Called when a load has failed; returns whether the next start is planned with less memory. If
    # so, it follows at once and the failure is not counted.
    reduce: Callable[[FailureCause], bool]


class Instance:
    """One replica of a model; `name` is unique among instances, and part of file names.

    Commands return at once; `wait` waits for their effect. The last command given before `serve`
    runs is applied then. `clock` returns monotonic seconds.
    """

    def __init__(
        self,
        name: str,
        model: str,
        services: InstanceServices,
        *,
        limits: InstanceLimits,
        policy: RestartPolicy,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.model = model
        self._services = services
        self._limits = limits
        self._traffic = services.traffic
        self._emit: Emit = functools.partial(services.emit, instance=name, model=model)
        self._clock = clock

        self._lifecycle = Lifecycle()
        self._since_s = clock()
        self._ready_at_s: float | None = None
        self._unhealthy_at_s = 0.0
        self._was_healthy = True
        self._restart = RestartTracker(policy, clock)
        self._restarts = 0
        self._cause: FailureCause | None = None
        self._warnings: tuple[FailureCause, ...] = ()

        self._context: state_tasks.StateContext | None = None  # of the latest run
        self._group: asyncio.TaskGroup | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._early_command: Event | None = None
        self._waiters: dict[asyncio.Future[InstanceSnapshot], frozenset[State]] = {}

    def __repr__(self) -> str:
        return f"<Instance {self.name}: {self._lifecycle.state}, run {self._lifecycle.run}>"

    # Commands.

    def start(self) -> None:
        """Start it. If it failed or waits for its next start, its failures are forgotten."""
        self._command(Event.START)

    def stop(self) -> None:
        self._command(Event.STOP)

    def restart(self) -> None:
        """Replace its process; forgets failures as `start` does."""
        self._command(Event.RESTART)

    def mark_overdue(self, run: int, reason: str) -> None:
        """Drain and replace a process that computes for a disconnected client or lost a worker."""
        self._apply(Event.OVERDUE, run, reason=reason)

    def configure(self, limits: InstanceLimits, policy: RestartPolicy) -> None:
        """Apply new limits from the next state on, and a new policy from the next failure on."""
        self._limits = limits
        self._restart.policy = policy

    # State.

    def snapshot(self) -> InstanceSnapshot:
        run, state = self._run, self._lifecycle.state
        retry_at_s = self._since_s + self._restart.delay_s
        return InstanceSnapshot(
            name=self.name,
            model=self.model,
            state=state,
            wanted=self._lifecycle.wanted,
            run=self._lifecycle.run,
            pid=run.pid if run else None,
            since_s=self._since_s,
            up_s=self._up_s(),
            restarts=self._restarts,
            failures=self._restart.failures,
            retry_in_s=max(0.0, retry_at_s - self._clock()) if state is State.BACKOFF else None,
            cause=self._cause,
            warnings=self._warnings,
            load_progress=self._load_progress(),
            endpoint=run.endpoint if run else Endpoint(),
            api_key=run.launch.api_key if run else "",
            log_path=run.launch.log_path if run else None,
        )

    async def wait(self, wanted: frozenset[State]) -> InstanceSnapshot:
        """Wait, without a deadline, for one of the states, even passed; return its snapshot."""
        if self._lifecycle.state in wanted:
            return self.snapshot()
        waiter: asyncio.Future[InstanceSnapshot] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = wanted
        try:
            return await waiter
        finally:
            del self._waiters[waiter]

    @property
    def _run(self) -> ProcessRun | None:
        return self._context.run if self._context else None

    def _load_progress(self) -> float | None:
        run = self._run
        if run is None or run.number != self._lifecycle.run or run.progress is None:
            return None
        return run.progress[1] if self._lifecycle.state not in states.WITHOUT_PROCESS else None

    def _up_s(self) -> float:
        return 0.0 if self._ready_at_s is None else self._clock() - self._ready_at_s

    # Serving.

    async def serve(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                try:
                    if self._early_command:
                        self._command(self._early_command)
                    await asyncio.Event().wait()  # until cancelled
                finally:
                    self._group = None
                    self._cancel()
        finally:
            self._apply(Event.STOP)
            self._apply(Event.EXITED, self._lifecycle.run)

    def _command(self, event: Event) -> None:
        if self._group is None:
            self._early_command = event
            return
        if event is not Event.STOP and self._lifecycle.state in {State.BACKOFF, State.FAILED}:
            self._restart.forget()
        self._apply(event)

    def _apply(
        self, event: Event, run: int | None = None, *, give_up: bool = False, reason: str = ""
    ) -> None:
        """Apply an event: the only place where the state changes."""
        before = self._lifecycle
        self._lifecycle = now = states.step(before, event, run=run, give_up=give_up)
        if before.state is now.state and event is not Event.DEADLINE:
            return
        self._cancel()
        self._since_s = self._clock()
        self._emit(
            "instance.state_changed",
            before=before.state.value,
            after=now.state.value,
            run=now.run,
            reason=reason or event.value,
        )
        self._change(before, now.state)
        self._begin()
        for waiter, wanted in self._waiters.items():
            if now.state in wanted and not waiter.done():
                waiter.set_result(self.snapshot())

    def _change(self, before: Lifecycle, now: State) -> None:
        if before.state is State.READY:
            self._traffic.withdraw(self.name)
            in_flight = self._traffic.activity(self.name).in_flight
            self._emit("instance.withdrawn", run=self._lifecycle.run, in_flight=in_flight)
        if now is State.READY:
            self._enter_service()
        elif now is State.UNHEALTHY:
            self._unhealthy_at_s = self._since_s
            self._was_healthy = False
        elif now is State.STARTING:
            self._ready_at_s = None
            is_first = before.state is State.STOPPED or before.stop_reason == "measured"
            self._restarts += not is_first
        elif now in states.WITHOUT_PROCESS:
            self._ready_at_s = None

    def _enter_service(self) -> None:
        self._cause = None
        self._was_healthy = True
        self._ready_at_s = self._ready_at_s or self._clock()
        if run := self._run:
            run.stop_parsing()
            self._warnings = exit_cause.warnings(run.last_lines(_LINES_TO_JUDGE))
        self._services.admit(self.snapshot())

    # The task and the timer of a state.

    def _begin(self) -> None:
        if self._group is None:
            return
        state = self._lifecycle.state
        if state is State.STARTING:
            process = self._run_process(self._lifecycle.run)
            self._group.create_task(process, name=f"{self.name} process")
        else:
            self._begin_task()
        if deadline := states.DEADLINES.get(state):
            self._set_timer(self._limit_s(deadline))

    def _begin_task(self) -> None:
        """Begin the task of the state. In STARTING, call this once there is a run to watch."""
        state = self._lifecycle.state
        if self._group and (task := state_tasks.STATE_TASKS.get(state)):
            self._task = self._group.create_task(self._work(task), name=f"{self.name} {state}")

    def _cancel(self) -> None:
        if self._timer:
            self._timer.cancel()
        if self._task:
            self._task.cancel()
        self._timer = self._task = None

    async def _work(self, task: state_tasks.StateTask) -> None:
        if self._context is None:
            return
        context = replace(
            self._context,
            limits=self._limits,
            was_healthy=self._was_healthy,
            is_overdue=self._lifecycle.stop_reason == "overdue",
        )
        if event := await persist(f"instance {self._lifecycle.state}", lambda: task(context)):
            self._task = None
            self._apply(event, context.run.number)

    def _limit_s(self, deadline: states.Deadline) -> float:
        limit_s = deadline(self._limits, self._restart.delay_s)
        if self._lifecycle.state is State.UNHEALTHY:
            is_waited_for = self._traffic.activity(self.name).in_flight > 0
            is_urgent = is_waited_for or (self._run is not None and self._run.is_suspended())
            return recovery_timeout_s(self._limits, limit_s, is_urgent=is_urgent)
        return limit_s

    def _set_timer(self, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        due_at_s = loop.time() + delay_s
        self._timer = loop.call_at(due_at_s, self._expire, due_at_s, delay_s)

    def _expire(self, due_at_s: float, delay_s: float) -> None:
        """Apply the deadline, unless this loop was late or a loading engine wrote output."""
        if asyncio.get_running_loop().time() - due_at_s > _LATE_S:
            self._set_timer(delay_s)
            return
        if self._lifecycle.state is State.STARTING and (run := self._run):
            left_s = run.alive_at_s + self._limits.load_timeout_s - self._clock()
            if left_s > 0:
                self._set_timer(left_s)
                return
        self._apply(Event.DEADLINE)

    # The process of one run.

    async def _run_process(self, number: int) -> None:
        end = await self._unready_cause() or await run_to_exit(lambda: self._new_run(number))
        if isinstance(end, Exit):
            self._note_exit(number, end)
        else:
            self._apply_exit(number, end, is_own=end.code not in exit_cause.EXTERNAL)

    async def _unready_cause(self) -> FailureCause | None:
        try:
            await self._services.prepare()
        except CorralError as error:
            return exit_cause.not_launchable(error)
        except Exception as error:  # noqa: BLE001 (a task of the daemon outlives any failure)
            FAILURES.note("instance preparation", error)
            return exit_cause.internal(error)
        is_wanted = self._lifecycle.state is State.STARTING
        return None if is_wanted else exit_cause.known_cause("withdrawn")

    def _new_run(self, number: int) -> ProcessRun:
        launch = self._services.launch(number)

        def on_progress(progress: Progress) -> None:
            stage, value = progress
            self._emit("instance.load_progress", run=number, stage=stage, value=value)

        on_prefill = functools.partial(emit_prefill, self._emit, number)
        self._context = state_tasks.StateContext(
            self.name,
            ProcessRun(number, launch, clock=self._clock, on_progress=on_progress),
            self._traffic,
            self._limits,
            self._emit,
            self._services.persister,
            self._services.needs_restart,
            PrefillQueue(
                launch.prompts,
                on_prefill,
                has_prompt_cache=launch.has_prompt_cache,
                is_saved=self._services.persister.has_prompt,
            ),
        )
        self._begin_task()
        return self._context.run

    def _note_exit(self, number: int, end: Exit) -> None:
        self._emit(
            "instance.exited",
            run=number,
            code=end.code,
            signal=end.signal,
            up_s=round(self._up_s(), 3),
            fault=self._lifecycle.exit_outcome == "failure",
        )
        found = self._find_cause(end)
        # The log may quote a client's text, so it alone does not prove that a worker was lost.
        uses_workers = self._run is not None and self._run.launch.uses_workers
        is_lost = found.code in exit_cause.EXTERNAL and uses_workers
        process_exit = self._process_exit(end, found, is_lost=is_lost)
        reason = found.sentence if is_lost else ""
        computed = self._traffic.note_end(self.name, process_exit, reason=reason)
        if process_exit == "crashed" and computed:
            self._apply_exit(number, exit_cause.crash_cause(end.returncode, computed), is_own=False)
        else:
            is_own = not is_lost and process_exit != "killed"
            self._apply_exit(number, found, is_own=is_own)

    def _process_exit(self, end: Exit, found: FailureCause, *, is_lost: bool) -> ProcessExit:
        if found == exit_cause.known_cause("killed_from_outside"):
            return "killed"
        match self._lifecycle.stop_reason:
            case "requested" | "measured":
                return "stopped"
            case None if end.is_crash and not is_lost:
                return "crashed"
        return "failed"

    def _find_cause(self, end: Exit) -> FailureCause:
        match self._lifecycle.stop_reason:
            case "load_timeout":
                silent_s = self._limits.load_timeout_s
                return exit_cause.known_cause("load_stalled", silent_s=silent_s)
            case "unresponsive":
                silent_s = round(self._clock() - self._unhealthy_at_s, 1)
                return exit_cause.known_cause("unresponsive", silent_s=silent_s)
            case _:
                lines = self._run.last_lines(_LINES_TO_JUDGE) if self._run else ()
                is_ours = self._lifecycle.state in {State.STOPPING, State.KILLING}
                if end.is_kill and not is_ours and not exit_cause.has_aborted(lines):
                    return exit_cause.known_cause("killed_from_outside")
                return exit_cause.diagnose(end.returncode, lines)

    def _apply_exit(self, number: int, cause: FailureCause, *, is_own: bool) -> None:
        """Apply EXITED; count it if it is a failure. `is_own` if the engine may have caused it."""
        if self._lifecycle.exit_outcome != "failure":
            self._apply(Event.EXITED, number)
            return
        self._cause = cause
        if self._lifecycle.state in _LOADING and self._services.reduce(cause):
            self._apply(Event.RESTART, reason=cause.code)
            self._apply(Event.EXITED, number)
            return
        give_up = not self._restart.record(by_request=not is_own) or cause.permanent
        self._apply(Event.EXITED, number, give_up=give_up, reason=cause.code)
        if give_up:
            log_path = self._run.launch.log_path if self._run else None
            self._emit(
                "instance.failed",
                failures=self._restart.failures,
                code=cause.code,
                reason=cause.sentence,
                hint=cause.hint,
                log=str(log_path) if log_path else None,
            )
