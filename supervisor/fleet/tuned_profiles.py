"""Lays the tuned profiles of models on their profiles."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from functools import cache

from supervisor.errors import CorralError
from supervisor.flags import profile, tuned
from supervisor.flags.plan import ModelEntry, Plan
from supervisor.flags.profile import Profile
from supervisor.flags.tuned import Conditions, Tuned
from supervisor.host import machine
from supervisor.host.cpu_name import cpu_name
from supervisor.host.paths import Directories

# Returns the tuned profile of a model, if it has one.
ReadTuned = Callable[[str], Tuned | None]


class TunedProfiles:
    """The profiles of models, with the tuned ones that apply here."""

    def __init__(self, directories: Directories, read: ReadTuned | None = None) -> None:
        self._read = read or (lambda name: tuned.read(name, directories.tuned_profiles))
        self._load: Callable[[str], Profile] = lambda name: profile.load(name, directories.profiles)

    def reading_once(self) -> TunedProfiles:
        """Return the same with each profile that tuned ones lie on read once."""
        other = copy.copy(self)
        other._load = cache(self._load)  # noqa: SLF001 (a copy of this one)
        return other

    def used(self, entry: ModelEntry) -> Tuned | None:
        """Return a model's tuned profile if it applies; raises SettingsInvalid."""
        found = self._read(entry.name)
        if found is None:
            return None
        here = Conditions(entry.profile, machine_here())
        return None if tuned.reason_unused(found, here) else found

    def profile(self, entry: ModelEntry) -> Profile:
        """Load a model's profile with its tuned one on top; raises SettingsInvalid."""
        under = self._load(entry.profile)
        found = self.used(entry)
        if found is None:
            return under
        return profile.overlaid(under, found.flags, f"{entry.name} (tuned)")

    def replicas(self, entry: ModelEntry) -> int | None:
        """Return the tuned number of instances; a broken file is reported by the start."""
        with suppress(CorralError):
            found = self.used(entry)
            return found.replicas if found else None
        return None

    def warnings(self, entry: ModelEntry, plan: Plan) -> tuple[str, ...]:
        found = self._read(entry.name)
        if found is None:
            return ()
        now = tuned.conditions(entry.profile, machine_here(), plan.engine, plan.gguf)
        return tuple(tuned.warnings(found, now))


def machine_here() -> str:
    return tuned.machine_text(cpu_name(), machine.read())
