"""Starts canaries, watches them, and promotes or withdraws each.

A canary is a trial that `corral.toml` does not have: one more replica of a model, whose share of
conversations and figures are those of any trial. Replanning after a change drains what it replaces,
so no answer is cut.
"""

from __future__ import annotations

import asyncio
import functools
import tomllib
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from supervisor.builds.installed import EngineSetting
from supervisor.errors import AccessDenied, CorralError, SettingsInvalid, StartFailed
from supervisor.events import Emit, Event
from supervisor.experiments.canary import (
    Canary,
    CanaryHistory,
    CanaryRequest,
    CanaryTrials,
    Outcome,
    can_have_canary,
)
from supervisor.experiments.trials import Trials, replicas_by_side
from supervisor.experiments.verdict import Decision, decide
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.model import Replica
from supervisor.fleet.planner import LaunchPlanner
from supervisor.fleet.reload import Reload, ReloadResult
from supervisor.settings.load import Loaded

if TYPE_CHECKING:
    from supervisor.settings.edit import ChangedFile, Edit, Table


def check_can_start(
    request: CanaryRequest, fleet: Fleet, loaded: Loaded, running: Container[str]
) -> None:
    """Check a canary's preconditions before anything is changed; raises CorralError."""
    name = request.model
    (model,) = fleet.select([name])
    if name in running:
        raise CorralError(
            f"{name} has a canary already",
            hint=f"corral engine canary --withdraw --model {name} ends it",
        )
    if not can_have_canary(loaded.settings.models[name]):
        raise SettingsInvalid(
            f"{name} has a trial or workers in its settings, and no canary beside them",
            hint=f"corral trial {name} --end ends a trial",
        )
    if loaded.path is None or loaded.origins.get(f"models.{name}.path") != "file":
        from supervisor.settings.edit import key_text  # noqa: PLC0415 (tomlkit takes memory)

        key = key_text(("models", name))
        raise SettingsInvalid(
            f"{name} is in no settings file, which would keep the engine of its canary",
            hint=f"write [{key}] with its path into corral.toml, then corral reload",
        )
    if not model.is_wanted:
        raise CorralError(f"{name} is not loaded", hint=f"corral load {name} loads it")


def check_engine(request: CanaryRequest, planner: LaunchPlanner) -> None:
    """Check that a canary's engine runs and is another one; may run it. Raises CorralError."""
    entry = planner.entry(request.model)
    own, other = (planner.engine_of(side) for side in (entry, request.trial.apply_to(entry)))
    if own.path == other.path:
        raise SettingsInvalid(
            f"{request.model} runs {own.path} already", hint="corral engine list shows other builds"
        )


def failure(result: ReloadResult | CorralError) -> CorralError | None:
    """Return why a start failed, or None."""
    if isinstance(result, CorralError):
        return result
    for start_failure in result.failures:
        hint = start_failure.cause.hint if start_failure.cause else None
        log = str(start_failure.log_path) if start_failure.log_path else None
        return StartFailed(
            f"{start_failure.place} did not start: {start_failure.reason}", hint=hint, log=log
        )
    return None


def no_canary(model: str) -> CorralError:
    return CorralError(
        f"{model} has no canary", hint=f"corral engine canary BUILD --model {model} starts one"
    )


def keep_engine(
    request: CanaryRequest, path: Path | None, found: ReloadResult | CorralError
) -> ChangedFile | None:
    """Set the engine in the settings file; None if it is set. `found` is a dry run of a reload.

    Raises CorralError if the file has changes that are not applied, or cannot be changed.
    """
    from supervisor.settings.edit import change_file  # noqa: PLC0415 (tomlkit takes memory)

    if path is None:
        raise SettingsInvalid("the daemon was started without a settings file")
    path = path.resolve()
    is_set = _has_engine(path, request)
    _check_no_other_changes(found, request.model if is_set else None)
    if is_set:  # by `corral engine canary --promote`, which may write where the daemon may not
        return None
    return change_file(
        path, functools.partial(with_engine, model=request.model, engine=request.engine)
    )


def with_engine(text: str, model: str, engine: EngineSetting) -> Edit:
    """Set `engine` of a model; raises SettingsInvalid if the text cannot be changed safely."""
    from supervisor.settings.edit import (  # noqa: PLC0415 (as above)
        Edit,
        edit_text,
        key_text,
        toml,
    )

    line, key = f"engine = {toml(str(engine))}", key_text(("models", model))
    try:
        after = edit_text(text, functools.partial(_change, model=model, engine=str(engine)))
    except (SettingsInvalid, LookupError, TypeError) as error:
        raise SettingsInvalid(
            "the settings file cannot be changed safely",
            hint=f"write {line} into [{key}], then run corral reload",
        ) from error
    return Edit(after, (f"{key}.{line}",))


def check_kept(request: CanaryRequest, loaded: Loaded) -> SettingsInvalid | None:
    """Return an error if another source of settings wins over the file."""
    model = loaded.settings.models.get(request.model)
    if model and model.engine == request.engine:
        return None
    from supervisor.settings.edit import key_text  # noqa: PLC0415 (as above)

    return SettingsInvalid(
        f"{key_text(('models', request.model, 'engine'))} of the settings file has no effect",
        hint="corral config show tells where it is set",
    )


def _change(whole: Table, model: str, engine: str) -> None:
    whole["models"][model]["engine"] = engine


def _has_engine(path: Path, request: CanaryRequest) -> bool:
    try:
        models = tomllib.loads(path.read_text("utf-8"))["models"]
        return bool(models[request.model]["engine"] == str(request.engine))
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _check_no_other_changes(found: ReloadResult | CorralError, ours: str | None) -> None:
    if isinstance(found, CorralError):
        raise found
    changes = found.difference
    places = (*changes.added, *changes.removed, *changes.changed)
    if names := [str(place) for place in places if place.model != ours]:
        raise SettingsInvalid(
            f"corral.toml has changes that are not applied yet, of {', '.join(names)}",
            hint="corral reload --dry-run shows them, corral reload applies them",
        )


_CHECK_EVERY_S: Final = 1.0
BY_COMMAND: Final = "by command"


@dataclass(frozen=True, slots=True)
class CanaryParts:
    fleet: Fleet
    reload: Reload
    trials: Trials
    laid: CanaryTrials
    history: CanaryHistory
    emit: Emit


class Canaries:
    """At most one canary per model; only one change runs at a time."""

    def __init__(self, parts: CanaryParts) -> None:
        self._parts = parts
        self._running: dict[str, Canary] = {}
        self._changing = asyncio.Lock()
        self._woken = asyncio.Event()

    @property
    def running(self) -> tuple[Canary, ...]:
        return tuple(self._running.values())

    def left_s(self, canary: Canary) -> float | None:
        """Return the time until a canary is decided; None for by command."""
        if canary.decides_at_s is None:
            return None
        return max(0.0, canary.decides_at_s - self._now_s())

    def observe(self, event: Event) -> None:
        """Wake the checks if an engine crashed."""
        if event.name == "instance.exited" and event.fields["fault"]:
            self._woken.set()

    async def serve(self) -> None:
        """Decide canaries until cancelled."""
        await self._parts.history.end_interrupted()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_EVERY_S if self._running else None):
                    await self._woken.wait()
            self._woken.clear()
            for canary in self.running:
                await self._look(canary)

    async def start(self, request: CanaryRequest) -> CorralError | None:
        """Start a canary; return None once it serves. An error leaves nothing behind."""
        try:
            async with self._changing:
                return await self._start(request)
        except CorralError as error:
            return error

    async def promote(self, model: str) -> CorralError | None:
        """Make the canary's engine the model's own, in `corral.toml` and in all its replicas.

        If the file cannot be changed, nothing is, and the canary continues. If a replica does not
        start, the file is restored and the canary withdrawn.
        """
        async with self._changing:
            if (canary := self._running.get(model)) is None:
                return no_canary(model)
            return await self._promote(canary, BY_COMMAND)

    async def withdraw(self, model: str) -> CorralError | None:
        async with self._changing:
            if (canary := self._running.get(model)) is None:
                return no_canary(model)
            await self._withdraw(canary, BY_COMMAND)
            return None

    async def _start(self, request: CanaryRequest) -> CorralError | None:
        parts, model, limit_s = self._parts, request.model, request.limit_s
        check_can_start(request, parts.fleet, parts.reload.loaded, self._running)
        await asyncio.to_thread(check_engine, request, parts.fleet.planner)
        parts.laid.set(model, request.trial)
        if error := failure(await parts.reload.replan(model)):
            parts.laid.remove(model)
            await parts.reload.replan(model)
            return error
        parts.trials.begin_again(model)
        decides_at_s = None if limit_s is None else self._now_s() + limit_s
        self._running[model] = Canary(request, decides_at_s)
        await self._save()
        engine, share = str(request.engine), request.share
        parts.emit("canary.started", model=model, engine=engine, share=share, decides_in_s=limit_s)
        self._woken.set()
        return None

    async def _look(self, canary: Canary) -> None:
        """Promote or withdraw a canary if its figures say so."""
        async with self._changing:
            if self._running.get(canary.request.model) is not canary:
                return
            decision = self._decision(canary)
            if decision.step == "withdraw":
                await self._withdraw(canary, decision.reason)
            elif decision.step == "promote":
                error = await self._promote(canary, decision.reason)
                if error and canary.request.model in self._running:
                    canary.decides_at_s, canary.obstacle = None, error.message
                    model = canary.request.model
                    self._parts.emit("canary.promotion_refused", model=model, reason=error.message)

    def _decision(self, canary: Canary) -> Decision:
        model = canary.request.model
        if (trial := self._parts.trials.of(model)) is None:
            return Decision("withdraw", "the settings of its model have changed")
        decision = decide(trial.figures, canary.request.margin, is_over=self.left_s(canary) == 0)
        if trial.figures.sides["trial"].crashes:
            causes = (replica.instance.snapshot().cause for replica in self._replicas(model))
            if cause := next(filter(None, causes), None):
                return Decision("withdraw", f"its engine crashed: {cause.sentence}")
        return decision

    async def _promote(self, canary: Canary, reason: str) -> CorralError | None:
        """Change the file, then replace the model's replicas; the canary serves meanwhile."""
        reload, request = self._parts.reload, canary.request
        try:
            found = await reload.run(dry_run=True)
            changed = await asyncio.to_thread(keep_engine, request, reload.loaded.path, found)
        except CorralError as error:
            return error
        self._parts.laid.remove(request.model)
        failed = failure(await reload.run(dry_run=False)) or check_kept(request, reload.loaded)
        if failed is None:
            await self._end(canary, "promoted", reason)
            return None
        if changed:
            with suppress(AccessDenied):
                await asyncio.to_thread(changed.restore)
        await reload.run(dry_run=False)
        await self._withdraw(canary, f"its promotion failed: {failed.message}")
        return failed

    async def _withdraw(self, canary: Canary, reason: str) -> None:
        model = canary.request.model
        self._parts.laid.remove(model)
        for replica in self._replicas(model):
            replica.instance.stop()  # at once: another change of the fleet may take long
        await self._parts.reload.replan(model)
        await self._end(canary, "withdrawn", reason)

    def _replicas(self, model: str) -> Sequence[Replica]:
        found = self._parts.fleet.models.get(model)
        return replicas_by_side(found)["trial"] if found else ()

    async def _end(self, canary: Canary, outcome: Outcome, reason: str) -> None:
        request = canary.request
        del self._running[request.model]
        self._parts.history.add(request.model, str(request.engine), outcome, reason)
        await self._save()

    async def _save(self) -> None:
        await self._parts.history.save(canary.request for canary in self.running)

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()
