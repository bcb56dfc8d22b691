"""Starts canaries of engines, watches them, and promotes or withdraws each.

A canary is a trial that `corral.toml` does not have, with an engine and a deadline: one more
replica of a model, whose share of conversations and figures are those of any trial. Replanning
after a change drains the replaced instances, so no answer is cut.
"""

from __future__ import annotations

import asyncio
import tomllib
from collections import deque
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from attrs import define, field

from supervisor.builds.installed import EngineSetting
from supervisor.errors import AccessDenied, CorralError, SettingsInvalid, StartFailed
from supervisor.events import Emit, Event, Part
from supervisor.experiments.trials import Trials, replicas_by_side
from supervisor.experiments.verdict import Decision, decide
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.model import Replica
from supervisor.fleet.planner import LaunchPlanner
from supervisor.fleet.reload import Reload, ReloadResult
from supervisor.plan.plan import CanaryTrial
from supervisor.settings.load import Loaded
from supervisor.settings.schema import ModelSettings, Settings
from supervisor.system import files

if TYPE_CHECKING:
    from supervisor.settings.edit import ChangedFile, Edit, Table

# A canary that ended: its model, engine, outcome, reason, and when (ISO 8601 in UTC).
Ended = Mapping[str, str]
_ENDED_MEMBERS: Final = ("model", "engine", "outcome", "reason", "at")
ENDED_MAX: Final = 16
_KEY: Final = "canaries"
BY_COMMAND: Final = "by command"
_RESTARTED: Final = "the daemon was restarted"


@dataclass(slots=True)
class Canary:
    """A canary with a share of new conversations, above 0 and below 1."""

    model: str
    engine: EngineSetting
    share: float
    # When it is promoted or withdrawn, after its start; None leaves that to commands.
    limit_s: float | None
    margin: float  # how much slower it may be: 0.1 for a tenth
    decides_at_s: float | None = None  # likewise on the monotonic clock, while it runs
    obstacle: str | None = None  # why its promotion was refused, so that it awaits a command

    @property
    def trial(self) -> CanaryTrial:
        return CanaryTrial(engine=self.engine, share=self.share)


def with_canaries(settings: Settings, trials: Mapping[str, CanaryTrial]) -> Settings:
    """Return settings with the canaries' trials on the models that can have one."""
    changed = {
        name: model.model_copy(update={"trial": trials[name]})
        for name, model in settings.models.items()
        if name in trials and _can_have_canary(model)
    }
    if not changed:
        return settings
    return settings.model_copy(update={"models": {**settings.models, **changed}})


def _can_have_canary(model: ModelSettings) -> bool:
    """Whether a model has neither a trial, which needs one more replica, nor RPC workers."""
    return model.trial is None and not model.workers


def save(root: Path, running: Iterable[Canary], ended: Iterable[Ended]) -> None:
    """Save the canaries that outlast the daemon, readable by this user alone."""
    named = [{"model": canary.model, "engine": str(canary.engine)} for canary in running]
    files.put(root, _KEY, {"running": named, "ended": list(ended)})


def read(root: Path) -> tuple[list[tuple[str, str]], list[Ended]]:
    """Return model and engine of running canaries, and the ended; an unusable file is missing."""
    found = files.get(root, _KEY) or {}
    with suppress(TypeError, ValueError, LookupError, AttributeError):
        running = [(str(canary["model"]), str(canary["engine"])) for canary in found["running"]]
        ended = found["ended"][-ENDED_MAX:]
        return running, [{name: str(end[name]) for name in _ENDED_MEMBERS} for end in ended]
    return [], []


def _check_can_start(canary: Canary, fleet: Fleet, loaded: Loaded, running: Container[str]) -> None:
    """Check a canary's preconditions before anything is changed; raises CorralError."""
    name = canary.model
    (model,) = fleet.select([name])
    if name in running:
        raise CorralError(
            f"{name} has a canary already",
            hint=f"corral engine canary --withdraw --model {name} ends it",
        )
    if not _can_have_canary(loaded.settings.models[name]):
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


def _check_engine(canary: Canary, planner: LaunchPlanner) -> None:
    """Check that a canary's engine runs and is another one; may run it. Raises CorralError."""
    entry = planner.entry(canary.model)
    own, other = (planner.engine_of(side) for side in (entry, canary.trial.apply_to(entry)))
    if own.path == other.path:
        raise SettingsInvalid(
            f"{canary.model} runs {own.path} already", hint="corral engine list shows other builds"
        )


def _failure(result: ReloadResult | CorralError) -> CorralError | None:
    """Return why a start failed, or None."""
    if isinstance(result, CorralError):
        return result
    if not result.failures:
        return None
    first = result.failures[0]
    hint, log = first.cause.hint if first.cause else None, first.log_path
    reason = f"{first.place} did not start: {first.reason}"
    return StartFailed(reason, hint=hint, log=str(log) if log else None)


def keep_engine(
    canary: Canary, path: Path | None, found: ReloadResult | CorralError
) -> ChangedFile | None:
    """Set the engine in the settings file; None if it is set. `found` is a dry run of a reload.

    Raises CorralError if the file has changes that are not applied, or cannot be changed.
    """
    from supervisor.settings.edit import change_file  # noqa: PLC0415 (tomlkit takes memory)

    if path is None:
        raise SettingsInvalid("the daemon was started without a settings file")
    path = path.resolve()
    is_set = _has_engine(path, canary)
    _check_no_other_changes(found, canary.model if is_set else None)
    if is_set:  # by `corral engine canary --promote`, which may write where the daemon may not
        return None
    return change_file(path, lambda text: with_engine(text, canary.model, canary.engine))


def with_engine(text: str, model: str, engine: EngineSetting) -> Edit:
    """Set `engine` of a model; raises SettingsInvalid if the text cannot be changed safely."""
    from supervisor.settings import edit  # noqa: PLC0415 (as above)

    def change(whole: Table) -> None:
        whole["models"][model]["engine"] = str(engine)

    line, key = f"engine = {edit.toml(str(engine))}", edit.key_text(("models", model))
    try:
        return edit.edit_text(text, change), (f"{key}.{line}",)
    except (SettingsInvalid, LookupError, TypeError) as error:
        raise SettingsInvalid(
            "the settings file cannot be changed safely",
            hint=f"write {line} into [{key}], then run corral reload",
        ) from error


def _check_kept(canary: Canary, loaded: Loaded) -> SettingsInvalid | None:
    """Return an error if another source of settings wins over the file."""
    model = loaded.settings.models.get(canary.model)
    if model and model.engine == canary.engine:
        return None
    from supervisor.settings.edit import key_text  # noqa: PLC0415 (as above)

    return SettingsInvalid(
        f"{key_text(('models', canary.model, 'engine'))} of the settings file has no effect",
        hint="corral config show tells where it is set",
    )


def _has_engine(path: Path, canary: Canary) -> bool:
    try:
        models = tomllib.loads(path.read_text("utf-8"))["models"]
        return bool(models[canary.model]["engine"] == str(canary.engine))
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


@define(eq=False, slots=False)
class Canaries(Part):
    """At most one canary per model; only one change runs at a time.

    `overlay` has the trials that the planner adds to the settings, by model; `ended` are the latest
    canaries that ended, the latest last.
    """

    task = "canaries"
    serves_until = "drain"

    _fleet: Fleet
    _reload: Reload
    _trials: Trials
    _overlay: dict[str, CanaryTrial]
    _emit: Emit
    _record: Path
    _running: dict[str, Canary] = field(factory=dict, init=False)
    _changing: asyncio.Lock = field(factory=asyncio.Lock, init=False)
    _woken: asyncio.Event = field(factory=asyncio.Event, init=False)

    def __attrs_post_init__(self) -> None:
        self.ended: deque[Ended] = deque(maxlen=ENDED_MAX)

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
        """Decide canaries until cancelled; first withdraw those that the last daemon ran."""
        interrupted, ended = await asyncio.to_thread(read, self._record)
        self.ended.extend(ended)
        for model, engine in interrupted:
            self._note_end(model, engine, "withdrawn", _RESTARTED)
        if interrupted:
            await self._save()
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_EVERY_S if self._running else None):
                    await self._woken.wait()
            self._woken.clear()
            for canary in self.running:
                await self._look(canary)

    async def start(self, canary: Canary) -> CorralError | None:
        """Start a canary; return None once it serves. An error leaves nothing behind."""
        try:
            async with self._changing:
                return await self._start(canary)
        except CorralError as error:
            return error

    async def end(self, model: str, verb: Literal["promote", "withdraw"]) -> CorralError | None:
        """Withdraw a canary, or make its engine the model's own, in `corral.toml` and its replicas.

        If the file cannot be changed, nothing is, and the canary continues. If a replica does not
        start, the file is restored and the canary withdrawn.
        """
        async with self._changing:
            if (canary := self._running.get(model)) is None:
                hint = f"corral engine canary BUILD --model {model} starts one"
                return CorralError(f"{model} has no canary", hint=hint)
            if verb == "promote":
                return await self._promote(canary, BY_COMMAND)
            await self._withdraw(canary, BY_COMMAND)
            return None

    async def _start(self, canary: Canary) -> CorralError | None:
        model, limit_s = canary.model, canary.limit_s
        _check_can_start(canary, self._fleet, self._reload.loaded, self._running)
        await asyncio.to_thread(_check_engine, canary, self._fleet.planner)
        self._overlay[model] = canary.trial
        if error := _failure(await self._reload.replan(model)):
            del self._overlay[model]
            await self._reload.replan(model)
            return error
        self._trials.begin_again(model)
        canary.decides_at_s = None if limit_s is None else self._now_s() + limit_s
        self._running[model] = canary
        await self._save()
        engine, share = str(canary.engine), canary.share
        self._emit("canary.started", model=model, engine=engine, share=share, decides_in_s=limit_s)
        self._woken.set()
        return None

    async def _look(self, canary: Canary) -> None:
        """Promote or withdraw a canary if its figures say so."""
        async with self._changing:
            model = canary.model
            if self._running.get(model) is not canary:
                return
            step, reason = self._decide(canary)
            if step == "withdraw":
                await self._withdraw(canary, reason)
            elif step == "promote":
                error = await self._promote(canary, reason)
                if error and model in self._running:
                    canary.decides_at_s, canary.obstacle = None, error.message
                    self._emit("canary.promotion_refused", model=model, reason=error.message)

    def _decide(self, canary: Canary) -> Decision:
        if (trial := self._trials.of(canary.model)) is None:
            return "withdraw", "the settings of its model have changed"
        if trial.figures.sides["trial"].crashes:
            causes = (replica.instance.snapshot().cause for replica in self._replicas(canary))
            if cause := next(filter(None, causes), None):
                return "withdraw", f"its engine crashed: {cause.sentence}"
        return decide(trial.figures, canary.margin, is_over=self.left_s(canary) == 0)

    async def _promote(self, canary: Canary, reason: str) -> CorralError | None:
        """Change the file, then replace the model's replicas; the canary serves meanwhile."""
        reload = self._reload
        try:
            found = await reload.run(dry_run=True)
            changed = await asyncio.to_thread(keep_engine, canary, reload.loaded.path, found)
        except CorralError as error:
            return error
        del self._overlay[canary.model]
        failed = _failure(await reload.run(dry_run=False)) or _check_kept(canary, reload.loaded)
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
        self._overlay.pop(canary.model, None)
        for replica in self._replicas(canary):
            replica.instance.stop()  # at once: another change of the fleet may take long
        await self._reload.replan(canary.model)
        await self._end(canary, "withdrawn", reason)

    def _replicas(self, canary: Canary) -> Sequence[Replica]:
        found = self._fleet.models.get(canary.model)
        return replicas_by_side(found)["trial"] if found else ()

    async def _end(
        self, canary: Canary, outcome: Literal["promoted", "withdrawn"], reason: str
    ) -> None:
        del self._running[canary.model]
        self._note_end(canary.model, str(canary.engine), outcome, reason)
        await self._save()

    def _note_end(self, model: str, engine: str, outcome: str, reason: str) -> None:
        at = datetime.now(tz=UTC).isoformat(timespec="seconds")
        values = (model, engine, outcome, reason, at)
        self.ended.append(dict(zip(_ENDED_MEMBERS, values, strict=True)))
        name = "canary.promoted" if outcome == "promoted" else "canary.withdrawn"
        self._emit(name, model=model, engine=engine, reason=reason)

    async def _save(self) -> None:
        await asyncio.to_thread(save, self._record, self.running, tuple(self.ended))

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()
