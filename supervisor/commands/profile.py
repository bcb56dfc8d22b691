"""`corral profile list|show|check`: named sets of tuned flags."""

from __future__ import annotations

from pathlib import Path

from supervisor.flags import profile as profiles
from supervisor.flags.plan import check as check_profile
from supervisor.flags.profile import Profile
from supervisor.fleet.planner import LaunchPlanner
from supervisor.host.paths import directories
from supervisor.output import CommandResult, table
from supervisor.settings.load import load


def list_profiles() -> CommandResult:
    dirs = directories().profiles
    found = [profiles.load(name, dirs) for name in profiles.names(dirs)]
    rows = [(one.name, one.extends or "-", one.description) for one in found]
    return CommandResult(
        [_data(one) for one in found], table(("PROFILE", "EXTENDS", "WHAT FOR"), rows)
    )


def show_profile(name: str) -> CommandResult:
    found = profiles.load(name, directories().profiles)
    rows = [(flag, str(value), found.origins[flag]) for flag, value in found.flags.items()]
    text = f"{found.description}\n{found.path}\n\n{table(('FLAG', 'VALUE', 'FROM'), rows)}"
    return CommandResult(_data(found), text)


def check(name: str | None, config: Path | None) -> CommandResult:
    where = directories()
    flags = LaunchPlanner(load(config, config_dir=where.config).settings, where).engine().flags
    names = [name] if name else profiles.names(where.profiles)
    omitted = {
        one: [
            f"{line.key}: {line.reason}"
            for line in check_profile(profiles.load(one, where.profiles), flags).omitted
        ]
        for one in names
    }
    text = "\n".join(f"{one}: fine" for one in names)
    notes = tuple(f"{one}: omits {line}" for one, lines in omitted.items() for line in lines)
    return CommandResult({"profiles": omitted}, text, notes)


def _data(found: Profile) -> dict[str, object]:
    return {
        "name": found.name,
        "path": str(found.path),
        "description": found.description,
        "extends": found.extends,
        "flags": dict(found.flags),
        "origins": dict(found.origins),
    }
