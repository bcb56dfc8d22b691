"""`corral engine install|update`: llama.cpp's releases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from supervisor.commands.engine_use import now_in_use
from supervisor.commands.transfer_meter import TransferMeter
from supervisor.engines import search
from supervisor.engines.changing import changing, use_build
from supervisor.engines.in_use import read_in_use
from supervisor.engines.installed import InstalledBuild, find_build
from supervisor.errors import EngineMissing
from supervisor.host.paths import Directories, directories
from supervisor.output import CommandResult, size
from supervisor.releases.api import ReleaseApi, new_client
from supervisor.releases.install import install as install_release
from supervisor.releases.install import installed_already
from supervisor.releases.release import is_tag
from supervisor.releases.target import this_machine
from supervisor.releases.variant import Choice, choose
from supervisor.settings.load import load
from supervisor.settings.schema import Settings

STABLE: Final = "stable"
NEWEST: Final = "newest"


@dataclass(frozen=True, slots=True)
class _Done:
    """A build that is there now, and what to know of it."""

    build: InstalledBuild
    is_new: bool
    notes: tuple[str, ...] = ()


def install(wanted: str, variant: str | None, config: Path | None) -> CommandResult:
    """Install a build; it is used where nothing else is found.

    Raises:
        EngineMissing: There is no such build for this machine.
        DownloadFailed, DiskFull, AccessDenied: It cannot be fetched.
        EngineBroken: It does not run on this machine.
        EnginesBusy: Another command changes the installed builds.
    """
    where = directories()
    settings = load(config, config_dir=where.config).settings
    with changing(where.engines):
        done = _install(wanted, variant, settings, where)
        if next(search.find(None, search.here(where.engines)), None) is None:
            use_build(done.build.name, where.engines)
        is_used = read_in_use(where.engines).current == done.build.name
    text = f"{'installed' if done.is_new else 'already installed:'} {done.build.name}"
    then = "in use" if is_used else f"corral engine use {done.build.name}"
    data = {**asdict(done.build), "path": str(done.build.path(where.engines))}
    return CommandResult({**data, "is_new": done.is_new}, f"{text} ({then})", done.notes)


def update(wanted: str, config: Path | None) -> CommandResult:
    """Install a newer build of the variant in use, and use it; the others stay."""
    where = directories()
    settings = load(config, config_dir=where.config).settings
    with changing(where.engines):
        current = _current(where)
        variant = current.variant.partition("-")[0] if current else None
        done = _install(wanted, variant, settings, where, newer_than=current)
        use_build(done.build.name, where.engines)
    shown = now_in_use(done.build.name, settings, where)
    if current == done.build:
        return replace(shown, text=f"{current.name} is up to date")
    text = shown.text + (f", was {current.name}" if current else "")
    return replace(shown, text=text, notes=(*done.notes, *shown.notes))


def _current(where: Directories) -> InstalledBuild | None:
    name = read_in_use(where.engines).current
    try:
        return find_build(name, where.engines) if name else None
    except EngineMissing:
        return None


def _install(
    wanted: str,
    variant: str | None,
    settings: Settings,
    where: Directories,
    newer_than: InstalledBuild | None = None,
) -> _Done:
    """Install a build unless it is there, or older than one."""
    if not (wanted in {STABLE, NEWEST} or is_tag(wanted)):
        raise EngineMissing(
            f"no build of llama.cpp is named {wanted!r}",
            hint=f"name a build such as b11434, a version such as v0.5.0, {STABLE} or {NEWEST}",
        )
    target, releases = this_machine(), settings.releases
    with new_client() as client:
        release = ReleaseApi(client, releases.api).find(wanted)
        if newer_than and (release.build or 0) <= newer_than.build:
            return _Done(newer_than, is_new=False)
        choice = choose(release, target, variant)
        if there := installed_already(choice, where.engines):
            return _Done(there, is_new=False)
        with TransferMeter() as meter:
            meter.note(f"{choice.name}, {choice.reason}; {size(choice.size_bytes)} to download")

            def show(stage: str, done: int, whole: int) -> None:
                name, _, file = stage.partition(" ")
                meter.show(file, name, done, whole)

            made = install_release(choice, where.engines, client, releases.downloads, show)
    return _Done(made.build, is_new=True, notes=tuple(_notes(choice, len(made.engine.devices))))


def _notes(choice: Choice, devices: int) -> Iterator[str]:
    variant = choice.named.variant
    if variant != "cpu" and not devices:
        yield (
            f"{choice.name} runs, but lists no device: it computes on the CPU until the driver "
            f"for {variant} is there"
        )
