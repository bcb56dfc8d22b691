"""What new settings change in what runs. Pure.

Compared is what a command line is made from (`LaunchFingerprint`), never the command line itself:
that also follows from how many instances share the machine, so one more model would restart all the
others for the sake of a thread each. A replica whose fingerprint stays runs on untouched, and its
next run, for whatever reason, is planned anew with what is true then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from proxy.nodes.settings import NodeSettings
from supervisor.fleet.launch_id import LaunchFingerprint, ReplicaId
from supervisor.settings.schema import Settings


@dataclass(frozen=True, slots=True)
class Difference:
    """What becomes of each replica; every one stands in exactly one of the four.

    Attributes:
        added: New ones.
        removed: Those that are no longer set.
        changed: Those that would run something else.
        kept: Those that run on untouched.
    """

    added: tuple[ReplicaId, ...]
    removed: tuple[ReplicaId, ...]
    changed: tuple[ReplicaId, ...]
    kept: tuple[ReplicaId, ...]

    @property
    def models_to_plan(self) -> frozenset[str]:
        """Return the models of which a new process will be made."""
        return frozenset(place.model for place in (*self.added, *self.changed))


def compare(
    running: Mapping[ReplicaId, LaunchFingerprint | None],
    wanted: Mapping[ReplicaId, LaunchFingerprint],
) -> Difference:
    """Return what leads from what runs to what is wanted.

    Args:
        running: What each replica was made from; None where that is not known, which differs from
            every fingerprint.
        wanted: What each shall be made from.
    """
    both = [place for place in wanted if place in running]
    return Difference(
        added=tuple(place for place in wanted if place not in running),
        removed=tuple(place for place in running if place not in wanted),
        changed=tuple(place for place in both if running[place] != wanted[place]),
        kept=tuple(place for place in both if running[place] == wanted[place]),
    )


def reload_notes(began_with: Settings, before: Settings, after: Settings) -> Iterator[str]:
    """Yield what a person should know of changes that are no replica's.

    Args:
        began_with: The settings that the daemon was started with.
        before: The settings until now.
        after: The settings from now on.
    """
    for key in sorted(type(began_with.proxy).model_fields):
        if (stays := getattr(began_with.proxy, key)) != getattr(after.proxy, key):
            yield f"proxy.{key} stays {stays} until the daemon is restarted"
    yield from _node_remarks(before.nodes, after.nodes)
    if before.supervisor != after.supervisor:
        yield "[supervisor] changed: its limits count from each instance's next state on"
    for name, model in after.models.items():
        if name in before.models and before.models[name].aliases != model.aliases:
            yield f"{name}: its aliases are now {', '.join(model.aliases) or 'none'}"
        if name in before.models and before.models[name].variants != model.variants:
            yield f"{name}: its variants are now {', '.join(model.variants) or 'none'}"


def _node_remarks(
    before: Mapping[str, NodeSettings], after: Mapping[str, NodeSettings]
) -> Iterator[str]:
    if added := after.keys() - before.keys():
        yield f"new nodes: {', '.join(sorted(added))}"
    if removed := before.keys() - after.keys():
        yield f"nodes that left: {', '.join(sorted(removed))}"
    if changed := {name for name in before.keys() & after.keys() if before[name] != after[name]}:
        yield f"nodes set otherwise: {', '.join(sorted(changed))}"
