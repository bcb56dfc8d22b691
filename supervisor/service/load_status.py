"""One line for `systemctl status`: which models are ready, and how far others are loaded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from supervisor.events import LOAD_PROGRESS, Event

_STATE_CHANGED: Final = "instance.state_changed"
_LOADING: Final = frozenset({"starting", "warming"})
# Instances of each kind that are named.
_NAMED_MAX: Final = 4


class LoadStatus:
    """The state of each instance, as its events tell."""

    def __init__(self) -> None:
        self._states: dict[str, str] = {}
        self._percent: dict[str, int] = {}

    @property
    def is_loading(self) -> bool:
        return not _LOADING.isdisjoint(self._states.values())

    def observe(self, event: Event) -> bool:
        """Return whether the event was about the state or the load of an instance."""
        if event.name == LOAD_PROGRESS:
            value = event.fields["value"]
            self._percent[str(event.fields["instance"])] = int(100 * float(str(value)))
        elif event.name == _STATE_CHANGED:
            self._enter(str(event.fields["instance"]), str(event.fields["after"]))
        else:
            return False
        return True

    def _enter(self, instance: str, state: str) -> None:
        self._percent.pop(instance, None)
        self._states[instance] = state
        if state == "stopped":
            del self._states[instance]

    @property
    def text(self) -> str:
        states = self._states
        if not states:
            return "no model is loaded"
        ready = sum(state == "ready" for state in states.values())
        loading = [self._progress(name) for name, state in states.items() if state in _LOADING]
        failed = [name for name, state in states.items() if state == "failed"]
        parts = [f"{ready} of {len(states)} instances ready"]
        parts += [f"loading {_listed(loading)}"] if loading else []
        parts += [f"failed: {_listed(failed)}"] if failed else []
        return "; ".join(parts)

    def _progress(self, instance: str) -> str:
        percent = self._percent.get(instance)
        return instance if percent is None else f"{instance} {percent} %"


def _listed(names: Iterable[str]) -> str:
    first, rest = [*names][:_NAMED_MAX], [*names][_NAMED_MAX:]
    return ", ".join(first) + (f" and {len(rest)} more" if rest else "")
