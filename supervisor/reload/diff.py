"""Finds what new settings change, and everything that is wrong with them, before they are applied.

Launch fingerprints are compared, never command lines: those also depend on how many instances share
the machine, so one more model would restart all others for the sake of a thread each. A replica
whose fingerprint is unchanged keeps running; its next run is planned with what is true then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache

from proxy.nodes.settings import NodeSettings
from supervisor.errors import CorralError
from supervisor.flags.plan import Plan
from supervisor.fleet.launch_id import LaunchFingerprint, ReplicaId
from supervisor.fleet.model import Replica
from supervisor.fleet.planner import LaunchPlanner
from supervisor.settings.load import Loaded, restart_changes
from supervisor.settings.schema import ModelSettings, Settings

# Checks the nodes of new settings, raising CorralError; returns what applies them.
PrepareNodes = Callable[[Loaded], Callable[[], None]]


@dataclass(frozen=True, slots=True)
class Difference:
    """What happens to each replica; every one is in exactly one of the four."""

    added: tuple[ReplicaId, ...]
    removed: tuple[ReplicaId, ...]
    changed: tuple[ReplicaId, ...]
    kept: tuple[ReplicaId, ...]

    @property
    def removed_at_once(self) -> tuple[ReplicaId, ...]:
        """Those whose model has no changed replica; the others serve while those are replaced."""
        changing = {place.model for place in self.changed}
        return tuple(place for place in self.removed if place.model not in changing)

    @property
    def to_plan(self) -> tuple[ReplicaId, ...]:
        """The replicas that get a new process."""
        return (*self.added, *self.changed)

    def only(self, models: Collection[str]) -> Difference:
        """Return what happens to these models while all others stay as they are."""

        def of_models(places: tuple[ReplicaId, ...]) -> tuple[ReplicaId, ...]:
            return tuple(place for place in places if place.model in models)

        others = (place for place in (*self.kept, *self.changed) if place.model not in models)
        return Difference(
            added=of_models(self.added),
            removed=of_models(self.removed),
            changed=of_models(self.changed),
            kept=(*others, *of_models(self.kept)),
        )

    def names(self) -> dict[str, list[str]]:
        return {
            "added": list(map(str, self.added)),
            "removed": list(map(str, self.removed)),
            "changed": list(map(str, self.changed)),
            "kept": list(map(str, self.kept)),
        }


@dataclass(frozen=True, slots=True)
class ReloadPlan:
    """New settings that passed every check, with a plan for each new process."""

    loaded: Loaded
    planner: LaunchPlanner
    plans: Mapping[ReplicaId, Plan]
    difference: Difference
    apply_nodes: Callable[[], None]


def prepare(
    replicas: Iterable[Replica],
    read: Callable[[], Loaded],
    make_planner: Callable[[Loaded], LaunchPlanner],
    prepare_nodes: PrepareNodes,
) -> ReloadPlan:
    """Read the settings, compare them with what runs, and plan. Blocks; changes nothing.

    Raises:
        CorralError: The first thing that is wrong.
    """
    loaded = read()
    planner = make_planner(loaded)
    difference = compare(_running(replicas), _wanted(planner))
    plans = {place: planner.plan_at(place) for place in difference.to_plan}
    return ReloadPlan(loaded, planner, plans, difference, prepare_nodes(loaded))


def compare(
    running: Mapping[ReplicaId, LaunchFingerprint | None],
    wanted: Mapping[ReplicaId, LaunchFingerprint],
) -> Difference:
    """Return how to get from one to the other; None differs from every fingerprint."""
    both = [place for place in wanted if place in running]
    return Difference(
        added=tuple(place for place in wanted if place not in running),
        removed=tuple(place for place in running if place not in wanted),
        changed=tuple(place for place in both if running[place] != wanted[place]),
        kept=tuple(place for place in both if running[place] == wanted[place]),
    )


def _running(replicas: Iterable[Replica]) -> dict[ReplicaId, LaunchFingerprint | None]:
    planner_of = cache(LaunchPlanner.reading_once)
    return {
        one.place: one.fingerprint or _unused_fingerprint(planner_of(one.planner), one.place)
        for one in replicas
    }


def _unused_fingerprint(planner: LaunchPlanner, place: ReplicaId) -> LaunchFingerprint | None:
    """Return the fingerprint of a replica that never ran; None where it could not."""
    try:
        return planner.fingerprint(place, planner.engine_at(place))
    except CorralError:
        return None


def _wanted(planner: LaunchPlanner) -> dict[ReplicaId, LaunchFingerprint]:
    planner = planner.reading_once()
    return {
        place: planner.fingerprint(place, planner.engine_at(place))
        for name in planner.entries
        for place in planner.places.of(name)
    }


def reload_notes(began_with: Settings, before: Settings, after: Settings) -> Iterator[str]:
    """Yield a sentence for each change that no replica shows.

    The proxy keeps what the daemon `began_with`, so `[proxy]` and `[jobs]` are compared with that;
    all but `default_model`, which belongs to the models, and the files of TLS.
    """
    yield from _proxy_notes(began_with, before, after)
    yield from _node_notes(before.nodes, after.nodes)
    if before.supervisor != after.supervisor:
        yield "[supervisor] changed: its limits apply from each instance's next state"
    yield from _hook_notes(before, after)
    for name, model in after.models.items():
        if name in before.models and before.models[name].aliases != model.aliases:
            yield f"{name}: its aliases are now {', '.join(model.aliases) or 'none'}"
        if name in before.models and before.models[name].variants != model.variants:
            yield f"{name}: its variants are now {', '.join(model.variants) or 'none'}"
        if name in before.models and before.models[name].loras != model.loras:
            yield f"{name}: its adapters are now {', '.join(model.loras) or 'none'}"
        if name in before.models and before.models[name].fallback != model.fallback:
            yield f"{name}: its fallback is now {', '.join(model.fallback) or 'none'}"
        yield from _trial_notes(name, before.models.get(name), model)


def _proxy_notes(began_with: Settings, before: Settings, after: Settings) -> Iterator[str]:
    for key, value in restart_changes(began_with, after):
        shown = "unset" if value is None else value
        yield f"{key} stays {shown} until the daemon is restarted"
    if began_with.proxy.tls and after.proxy.tls and before.proxy.tls != after.proxy.tls:
        yield "[proxy.tls] changed: it applies to new connections"
    if before.proxy.default_model != after.proxy.default_model:
        yield f"the default model is now {after.proxy.default_model or 'none'}"


def _hook_notes(before: Settings, after: Settings) -> Iterator[str]:
    if before.hooks != after.hooks:
        yield "[hooks] changed: they apply to what happens from now on"


def _trial_notes(name: str, before: ModelSettings | None, after: ModelSettings) -> Iterator[str]:
    was, now = before.trial if before else None, after.trial
    if now and (was is None or was.share != now.share):
        yield f"{name}: its trial gets {100 * now.share:g} % of new conversations"


def _node_notes(
    before: Mapping[str, NodeSettings], after: Mapping[str, NodeSettings]
) -> Iterator[str]:
    if added := after.keys() - before.keys():
        yield f"new nodes: {', '.join(sorted(added))}"
    if removed := before.keys() - after.keys():
        yield f"removed nodes: {', '.join(sorted(removed))}"
    if changed := {name for name in before.keys() & after.keys() if before[name] != after[name]}:
        yield f"changed nodes: {', '.join(sorted(changed))}"
