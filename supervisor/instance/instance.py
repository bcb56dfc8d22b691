"""Performs what `lifecycle` decides, for one instance.

Every change of state happens in `_apply`, which has no `await`: commands from outside, facts from
our own tasks and the deadline all go through it. Entering a state ends the last state's timer and
activity and begins its own. Apart from these, one task holds the process of a run from spawn to
burial, across states, and says EXITED at its end.
"""

from __future__ import annotations

import asyncio
import functools
import random
import time
from collections.abc import Callable

from supervisor.engine_client.endpoint import Endpoint
from supervisor.errors import CorralError
from supervisor.events import Emit
from supervisor.failures import FAILURES, persist
from supervisor.instance import states as states_module
from supervisor.instance.backoff import FailureHistory, RestartDecision, RestartPolicy, judge
from supervisor.instance.events import InstanceEvents
from supervisor.instance.health import queue_timeout_s
from supervisor.instance.limits import InstanceLimits
from supervisor.instance.slot_persistence import NoSlotPersister, SlotPersister
from supervisor.instance.snapshot import InstanceSnapshot
from supervisor.instance.state_tasks import STATE_TASKS, StateContext, StateTask
from supervisor.instance.states import STATES, Event, ExitOutcome, Lifecycle, State, StopReason
from supervisor.instance.traffic import Traffic
from supervisor.process import exit_cause
from supervisor.process.child import Exit
from supervisor.process.launch import Launch
from supervisor.process.run import ProcessRun
from supervisor.warmup.queue import PrefillQueue

# Enough for a failed start with its help text, or for an abort with its backtrace.
_LINES_TO_JUDGE = 300
# A deadline that is noticed this late was missed because the daemon or the machine stood still.
_LATE_S = 1.0


class Instance:
    """One replica of a model, kept as it is wanted.

    Commands never wait; `wait` does. They may be given before `serve` runs, which then takes the
    last of them in.

    Args:
        name: Unique among instances; part of file names.
        model: The model it is a replica of.
        launch: Makes what run number N needs. Raises CorralError where that cannot be.
        limits: How long each state may last.
        policy: How patiently it is restarted.
        traffic: Who sends it requests.
        emit: Where events go.
        keeper: Keeps its conversations while it is away.
        clock: Monotonic seconds.

    Attributes:
        limits: As given; replaced, the new ones count from its next state on.
        policy: As given; replaced, the new one counts from its next fault on.
    """

    def __init__(  # noqa: PLR0913 (each is a seam of its own)
        self,
        name: str,
        model: str,
        launch: Callable[[int], Launch],
        *,
        limits: InstanceLimits,
        policy: RestartPolicy,
        traffic: Traffic,
        emit: Emit,
        keeper: SlotPersister | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.model = model
        self.limits = limits
        self.policy = policy
        self._launch = launch
        self._traffic = traffic
        self._events = InstanceEvents(name, model, emit)
        self._keeper = keeper or NoSlotPersister()
        self._clock = clock

        self._life = Lifecycle()
        self._since_s = clock()
        self._ready_at_s: float | None = None
        self._unwell_at_s = 0.0
        self._is_well = True
        self._memory = FailureHistory()
        self._crashes = FailureHistory()
        self._backoff_s = 0.0
        self._restarts = 0
        self._cause: exit_cause.FailureCause | None = None
        self._warnings: tuple[exit_cause.StartWarning, ...] = ()

        self._run: ProcessRun | None = None
        self._reading = PrefillQueue((), lambda _prompt, _found: None)
        self._group: asyncio.TaskGroup | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._early: Event | None = None
        self._waiters: dict[asyncio.Future[InstanceSnapshot], frozenset[State]] = {}

    def __repr__(self) -> str:
        return f"<Instance {self.name}: {self._life.state}, run {self._life.run}>"

    # Commanding it.

    def start(self) -> None:
        """Want it up. One that failed or waits to try again is forgiven and starts at once."""
        self._command(Event.START)

    def stop(self) -> None:
        """Want it down: what it holds is finished first, within the drain's limit."""
        self._command(Event.STOP)

    def restart(self) -> None:
        """Want it up with a new process; forgives as `start` does."""
        self._command(Event.RESTART)

    def doubt(self, run: int) -> None:
        """Say that it did not answer in this run. It gets no requests until it is well again."""
        self._apply(Event.UNHEALTHY, run)

    def overdue(self, run: int, reason: str) -> None:
        """Say that in this run it goes on computing for a client that left.

        It gets no more requests, finishes those it has, and starts again; that is no fault.

        Args:
            run: The run.
            reason: What happened, for the event.
        """
        self._apply(Event.OVERDUE, run, reason=reason)

    # Looking at it.

    def snapshot(self) -> InstanceSnapshot:
        """Return what is true now."""
        run, waits = self._run, self._life.state is State.BACKOFF
        retry_at_s = self._since_s + self._backoff_s
        return InstanceSnapshot(
            name=self.name,
            model=self.model,
            state=self._life.state,
            wanted=self._life.wanted,
            run=self._life.run,
            pid=run.pid if run else None,
            since_s=self._since_s,
            up_s=self._up_s(),
            restarts=self._restarts,
            failures=self._memory.failures + self._crashes.failures,
            retry_in_s=max(0.0, retry_at_s - self._clock()) if waits else None,
            cause=self._cause,
            warnings=self._warnings,
            load_progress=self._load_progress(),
            endpoint=run.endpoint if run else Endpoint(),
            api_key=run.launch.api_key if run else "",
            log_path=run.launch.log_path if run else None,
        )

    async def wait(self, states: frozenset[State]) -> InstanceSnapshot:
        """Wait until it is in, or passes through, one of the states; the deadline is the caller's.

        Returns:
            The facts of that moment.
        """
        if self._life.state in states:
            return self.snapshot()
        waiter: asyncio.Future[InstanceSnapshot] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = states
        try:
            return await waiter
        finally:
            del self._waiters[waiter]

    # Keeping it.

    async def serve(self) -> None:
        """Keep it as it is wanted, until cancelled: then its process is killed and buried."""
        try:
            async with asyncio.TaskGroup() as group:
                await self._serve_in(group)
        finally:
            self._apply(Event.STOP)
            self._apply(Event.EXITED, self._life.run)

    async def _serve_in(self, group: asyncio.TaskGroup) -> None:
        self._group = group
        try:
            if self._early:
                self._command(self._early)
            await asyncio.get_running_loop().create_future()  # until cancelled
        finally:
            self._group = None
            self._end()

    def _command(self, event: Event) -> None:
        if self._group is None:
            self._early = event
            return
        if event is not Event.STOP and self._life.state in {State.BACKOFF, State.FAILED}:
            self._memory = self._crashes = FailureHistory()
        self._apply(event)

    def _apply(
        self, event: Event, run: int | None = None, *, hopeless: bool = False, reason: str = ""
    ) -> None:
        """Take an event in: the one place where state changes."""
        before = self._life
        self._life = states_module.step(before, event, run=run, hopeless=hopeless)
        if before.state is self._life.state and event is not Event.DEADLINE:
            return
        self._end()
        self._since_s = self._clock()
        self._events.changed(before.state, self._life, reason or event.value)
        self._cross(before.state)
        self._begin()
        self._tell_waiters()

    def _cross(self, before: State) -> None:
        """Do what leaving one state and entering another means, whatever the two are."""
        if before is State.READY:
            self._leave_service()
        if self._life.state is State.READY:
            self._enter_service()
        elif self._life.state is State.UNHEALTHY:
            self._unwell_at_s = self._since_s
            self._is_well = False
        elif not STATES[self._life.state].process:
            self._ready_at_s = None
        elif self._life.state is State.STARTING:
            self._ready_at_s = None
            self._restarts += before is not State.STOPPED

    def _enter_service(self) -> None:
        self._cause = None
        self._is_well = True
        self._ready_at_s = self._ready_at_s or self._clock()
        if self._run:
            self._run.stop_parsing()
            self._warnings = exit_cause.warnings(self._run.last_lines(_LINES_TO_JUDGE))
        self._traffic.admit(self.snapshot())

    def _leave_service(self) -> None:
        self._traffic.withdraw(self.name)
        self._events.withdrawn(self._life.run, self._traffic.activity(self.name).in_flight)

    # One timer and one activity.

    def _begin(self) -> None:
        """Begin the state's activity and timer."""
        if self._group is None:
            return
        state = self._life.state
        if state is State.STARTING:
            self._group.create_task(self._live(self._life.run), name=f"{self.name} process")
        if activity := STATE_TASKS.get(state):
            self._task = self._group.create_task(self._do(activity), name=f"{self.name} {state}")
        if limit := STATES[state].deadline:
            self._wind(self._limit_s(limit))

    def _end(self) -> None:
        """End the state's activity and timer."""
        if self._timer:
            self._timer.cancel()
        if self._task:
            self._task.cancel()
        self._timer = self._task = None

    async def _do(self, activity: StateTask) -> None:
        """Do what the state is for, and take in what came of it."""
        if self._run is None:
            return
        context = StateContext(
            self.name,
            self._run,
            self._traffic,
            self.limits,
            self._events,
            self._keeper,
            self._reading,
            self._is_well,
            self._life.leaving is StopReason.OVERDUE,
        )
        if event := await persist(f"instance {self._life.state}", lambda: activity(context)):
            self._task = None
            self._apply(event, context.run.number)

    def _limit_s(self, limit: str) -> float:
        if limit == "backoff_s":
            return self._backoff_s
        limit_s: float = getattr(self.limits, limit)
        if self._life.state is State.UNHEALTHY:
            held = self._traffic.activity(self.name).in_flight
            return queue_timeout_s(self.limits, limit_s, held)
        return limit_s

    def _wind(self, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        due_at_s = loop.time() + delay_s
        self._timer = loop.call_at(due_at_s, self._expire, due_at_s, delay_s)

    def _expire(self, due_at_s: float, delay_s: float) -> None:
        """Take the deadline in, unless it was not the engine that was late.

        Nor while a loading engine gave a sign of life meanwhile.
        """
        if asyncio.get_running_loop().time() - due_at_s > _LATE_S:
            self._wind(delay_s)
            return
        if self._life.state is State.STARTING and self._run:
            rest_s = self._run.alive_at_s + self.limits.load_timeout_s - self._clock()
            if rest_s > 0:
                self._wind(rest_s)
                return
        self._apply(Event.DEADLINE)

    # The process of one run.

    async def _live(self, number: int) -> None:
        """Hold the process of a run from spawn to burial, and say how it ended."""
        try:
            launch = self._launch(number)
        except CorralError as error:
            self._settle(number, exit_cause.not_launchable(error))
            return
        except Exception as error:  # noqa: BLE001 (a task of the daemon outlives any failure)
            FAILURES.note("launch", error)
            self._settle(number, exit_cause.internal(error))
            return
        told = functools.partial(self._events.warmed, number)
        self._reading = PrefillQueue(launch.prompts, told, has_ram=launch.has_ram)
        self._run = run = ProcessRun(
            number, launch, clock=self._clock, on_progress=self._events.progressed
        )
        try:
            self._exited(number, await run.run())
        except CorralError as error:
            self._settle(number, exit_cause.not_launchable(error))
        except OSError as error:
            self._settle(number, exit_cause.spawn_failed(error, launch.argv[0]))
        except Exception as error:  # noqa: BLE001 (a task of the daemon outlives any failure)
            FAILURES.note("instance process", error)
            self._settle(number, exit_cause.internal(error))

    def _exited(self, number: int, how: Exit) -> None:
        is_fault = self._life.ending is ExitOutcome.FAILURE
        self._events.exited(number, how, self._up_s(), is_fault=is_fault)
        is_crash = self._life.leaving is None and how.is_crash
        computed = self._traffic.ended(self.name, is_crash=is_crash)
        if is_crash and computed:
            self._settle_crash(number, exit_cause.crashed(how.returncode, computed))
        else:
            self._settle(number, self._find_cause(how))

    def _find_cause(self, how: Exit) -> exit_cause.FailureCause:
        match self._life.leaving:
            case StopReason.LOAD_TIMEOUT:
                return exit_cause.load_timeout(self.limits.load_timeout_s)
            case StopReason.UNRESPONSIVE:
                return exit_cause.unresponsive(round(self._clock() - self._unwell_at_s, 1))
            case _:
                lines = self._run.last_lines(_LINES_TO_JUDGE) if self._run else ()
                return exit_cause.diagnose(how.returncode, lines)

    def _settle(self, number: int, cause: exit_cause.FailureCause) -> None:
        """Say EXITED, and if that was a fault, what follows from it."""
        if self._life.ending is not ExitOutcome.FAILURE:
            self._apply(Event.EXITED, number)
            return
        verdict = self._judge(self._memory, can_give_up=True)
        self._cause, self._memory = cause, verdict.memory
        self._backoff_s = verdict.delay_s or 0.0
        hopeless = cause.permanent or verdict.delay_s is None
        self._apply(Event.EXITED, number, hopeless=hopeless, reason=cause.code)
        if hopeless:
            log_path = self._run.launch.log_path if self._run else None
            self._events.failed(cause, self._memory.failures, log_path)

    def _settle_crash(self, number: int, cause: exit_cause.FailureCause) -> None:
        """Say EXITED after a crash that came with requests: they may have caused it.

        It is tried again however often that happens, or one client could take a model from all
        others; the faults that count against the engine itself are remembered apart.
        """
        if self._life.ending is ExitOutcome.FAILURE:
            verdict = self._judge(self._crashes, can_give_up=False)
            self._cause, self._crashes = cause, verdict.memory
            self._backoff_s = verdict.delay_s or 0.0
        self._apply(Event.EXITED, number, reason=cause.code)

    def _judge(self, memory: FailureHistory, *, can_give_up: bool) -> RestartDecision:
        chance = random.random()  # noqa: S311 (spreads restarts, hides nothing)
        now_s = self._clock()
        return judge(self.policy, memory, now_s=now_s, chance=chance, can_give_up=can_give_up)

    def _load_progress(self) -> float | None:
        """Return how far this run has loaded; that of the last one is none of the next one's."""
        run = self._run if STATES[self._life.state].process else None
        is_this = run is not None and run.number == self._life.run
        return run.progress.value if run and is_this and run.progress else None

    def _up_s(self) -> float:
        return 0.0 if self._ready_at_s is None else self._clock() - self._ready_at_s

    def _tell_waiters(self) -> None:
        for waiter, states in self._waiters.items():
            if self._life.state in states and not waiter.done():
                waiter.set_result(self.snapshot())
