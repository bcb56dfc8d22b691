"""Why a canary does not start."""

from __future__ import annotations

from collections.abc import Container

from supervisor.canary.canary import CanaryRequest
from supervisor.canary.overlay import can_have_canary
from supervisor.errors import CorralError, SettingsInvalid, StartFailed
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.planner import LaunchPlanner
from supervisor.reload.reload import ReloadResult
from supervisor.settings.load import Loaded


def check_can_start(
    request: CanaryRequest, fleet: Fleet, loaded: Loaded, running: Container[str]
) -> None:
    """Check what a canary needs before anything is changed.

    Raises:
        NoSuchModel, SettingsInvalid: Its model cannot have one.
        CorralError: It has one, or is not loaded.
    """
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
        raise SettingsInvalid(
            f"{name} is in no settings file, which would keep the engine of its canary",
            hint=f"write [models.{name}] with its path into corral.toml, then corral reload",
        )
    if not model.is_wanted:
        raise CorralError(f"{name} is not loaded", hint=f"corral load {name} loads it")


def check_engine(request: CanaryRequest, planner: LaunchPlanner) -> None:
    """Check the engine of a canary; may run it.

    Raises:
        SettingsInvalid: The model runs it already.
        EngineMissing, EngineBroken: It does not run.
    """
    entry = planner.entry(request.model)
    own, other = (planner.engine_of(one) for one in (entry, request.trial.applied(entry)))
    if own.path == other.path:
        raise SettingsInvalid(
            f"{request.model} runs {own.path} already", hint="corral engine list shows other builds"
        )


def failure(result: ReloadResult | CorralError) -> CorralError | None:
    """Return why something that was to start did not."""
    if isinstance(result, CorralError):
        return result
    for one in result.failures:
        hint = one.cause.hint if one.cause else None
        log = str(one.log_path) if one.log_path else None
        return StartFailed(f"{one.place} did not start: {one.reason}", hint=hint, log=log)
    return None


def no_canary(model: str) -> CorralError:
    return CorralError(
        f"{model} has no canary", hint=f"corral engine canary BUILD --model {model} starts one"
    )
