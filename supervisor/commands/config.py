"""`corral config check|show|path`: the settings and their origins."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from supervisor.commands.certificate_notes import certificate_notes
from supervisor.errors import CorralError, SettingsInvalid, from_json
from supervisor.flags.plan import Plan
from supervisor.fleet.planner import LaunchPlanner
from supervisor.gguf.embedding import embedding
from supervisor.host.paths import directories
from supervisor.output import CommandResult, table
from supervisor.proxy_adapter.settings import checked, read_nodes
from supervisor.settings.load import flatten, load, search_path
from supervisor.settings.schema import Settings


def check(config: Path | None) -> CommandResult:
    where = directories()
    loaded = load(config, config_dir=where.config)
    checked(loaded.settings.proxy)
    read_nodes(loaded.settings.nodes, _emit_nothing)
    notes = tuple(certificate_notes(loaded.settings, datetime.now(UTC)))
    planner = LaunchPlanner(loaded.settings, where)
    plans = list(_all_plans(planner.reading_once()))
    _check_fallbacks(loaded.settings, plans)
    omitted = [
        f"{plan.model}: {line.flag} is omitted: {line.reason}"
        for plan in plans
        for line in plan.omitted
    ]
    source = str(loaded.path or "no settings file")
    names = ", ".join(planner.entries) or "none"
    data = {"path": source, "models": list(planner.entries), "omitted": omitted}
    return CommandResult(data, f"{source} is fine; models: {names}", (*omitted, *notes))


def _emit_nothing(_: str, /, **_fields: object) -> None:
    """A check starts no daemon, so its events have no reader."""


def _check_fallbacks(settings: Settings, plans: Iterable[Plan]) -> None:
    """Reject a fallback that generates no text; raises SettingsInvalid."""
    mute = [plan.model for plan in plans if _generates_nothing(plan)]
    names = {name for model in mute for name in (model, *settings.models[model].aliases)}
    lists = {
        f"proxy.fallback.{name}": set(others) for name, others in settings.proxy.fallback.items()
    }
    for name, model in settings.models.items():
        if model.fallback:
            lists[f"models.{name}.fallback"] = {name, *model.fallback}
    for place, others in lists.items():
        for wrong in names & others:
            raise SettingsInvalid(
                f"{place}: {wrong} makes embeddings or ranks texts, no chats",
                hint="only chats fall back: vectors and ranks of two models do not compare",
            )


def _generates_nothing(plan: Plan) -> bool:
    found = embedding(plan.gguf, plan.memory_inputs.chosen)
    return found is not None and found.is_only


def _all_plans(planner: LaunchPlanner) -> Iterator[Plan]:
    """Yield the plans of all models; raises CorralError with what is wrong with each model."""
    errors: list[CorralError] = []
    for name in planner.entries:
        try:
            yield from _plans(planner, name)
        except CorralError as error:
            errors.append(error)
    if errors:
        lines = dict.fromkeys(error.message for error in errors)
        raise from_json({**errors[0].as_json(), "message": "\n".join(lines)})


def _plans(planner: LaunchPlanner, model: str) -> Iterator[Plan]:
    yield planner.plan(model)
    if trial := planner.places.trial(model):
        yield planner.plan_trial(model, trial)


def show_settings(config: Path | None) -> CommandResult:
    loaded = load(config, config_dir=directories().config)
    values = flatten(loaded.settings.model_dump(mode="json"))
    rows = [(key, str(value), loaded.origins.get(key, "default")) for key, value in values.items()]
    data = {key: {"value": values[key], "origin": origin} for key, _, origin in rows}
    return CommandResult(data, table(("SETTING", "VALUE", "FROM"), rows))


def paths(config: Path | None) -> CommandResult:
    where = directories()
    loaded = load(config, config_dir=where.config)
    data = {
        "settings": str(loaded.path) if loaded.path else None,
        "looked at": [str(place) for place in search_path(where.config)],
        "config": str(where.config),
        "data": str(where.data),
        "cache": str(where.cache),
        "log": str(where.log),
        "runtime": str(where.runtime),
    }
    rows = [
        (key, ", ".join(value) if isinstance(value, list) else str(value or "none"))
        for key, value in data.items()
    ]
    return CommandResult(data, "\n".join(f"{key:10} {value}" for key, value in rows))
