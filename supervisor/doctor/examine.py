"""Looks at everything, in the order in which a start needs it. Changes nothing, starts no model."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from supervisor import __version__
from supervisor.control.client import Client
from supervisor.control.wire import DaemonStatus
from supervisor.doctor.clients import check_clients
from supervisor.doctor.engine import check_engine
from supervisor.doctor.finding import Finding, failed, hide, secrets_of
from supervisor.doctor.host import (
    check_address,
    check_directories,
    check_files,
    check_leftovers,
    check_memlock,
)
from supervisor.doctor.models import Need, check_drafts, check_memory, check_models
from supervisor.errors import CorralError, DaemonBusy, EngineBroken, EngineMissing, NotRunning
from supervisor.fleet.workshop import Workshop
from supervisor.host.paths import Directories
from supervisor.profile import machine
from supervisor.profile.engine import Engine
from supervisor.profile.machine import Machine
from supervisor.settings.load import Loaded, load
from supervisor.settings.root import Settings
from supervisor.show import size


@dataclass(frozen=True, slots=True)
class Scene:
    """Where to look.

    Attributes:
        loaded: The settings; the defaults where they cannot be read.
        where: Every directory.
        machine: This machine.
        status: What the running daemon says; None without one.
        engine: The engine that is used; None where there is none that runs.
    """

    loaded: Loaded
    where: Directories
    machine: Machine
    status: DaemonStatus | None
    engine: Engine | None


def examine(config: Path | None, where: Directories) -> list[Finding]:
    """Look at everything, and return what was found, fit for anybody's eyes.

    Args:
        config: The settings file that was named, or None to look for it.
        where: Every directory.
    """
    loaded, about_settings = _settings(config, where)
    secrets = secrets_of(loaded.settings)
    found = [_system(machine.read()), about_settings, *_look(loaded, where)]
    return [hide(one, Path.home(), secrets) for one in found]


def _look(loaded: Loaded, where: Directories) -> Iterator[Finding]:
    workshop = Workshop(loaded.settings, where)
    status, about_daemon = _daemon(where)
    yield about_daemon
    engine = None
    try:
        engine = workshop.engine()
        yield from check_engine(engine)
    except (EngineMissing, EngineBroken) as error:
        yield failed("engine", error)
    scene = Scene(loaded, where, machine.read(), status, engine)
    if engine:
        yield from _models(scene, workshop)
    yield from _host(scene, workshop)


def _settings(config: Path | None, where: Directories) -> tuple[Loaded, Finding]:
    try:
        loaded = load(config, config_dir=where.config)
    except CorralError as error:
        return Loaded(Settings(), None, {}), failed("settings", error)
    return loaded, Finding("settings", "ok", str(loaded.path or "no file; the defaults"))


def _system(here: Machine) -> Finding:
    """Say what a reader of a bug report asks first."""
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return Finding(
        "system",
        "ok",
        f"llama-corral {__version__}, Python {platform.python_version()}, {system}, "
        f"{here.physical_cores} cores, {here.logical_cores} threads, {size(here.memory_bytes)}",
    )


def _daemon(where: Directories) -> tuple[DaemonStatus | None, Finding]:
    try:
        status = Client(where.control_socket).status()
    except NotRunning:
        return None, Finding("daemon", "ok", "not running")
    except DaemonBusy as error:
        return None, failed("daemon", error)
    states = [f"{one['name']} {one['state']}" for m in status["models"] for one in m["instances"]]
    text = f"runs, version {status['version']}: {', '.join(states) or 'no models'}"
    return status, Finding("daemon", "ok", text)


def _models(scene: Scene, workshop: Workshop) -> Iterator[Finding]:
    needs = []
    for one in check_models(workshop):
        if isinstance(one, Need):
            needs.append(one)
        else:
            yield one
    if scene.status:
        yield from check_drafts(scene.status["models"])
    devices = scene.engine.devices if scene.engine else ()
    device_bytes = sum(device.total_mib for device in devices) << 20
    up = _up(scene.status)
    yield check_memory([one for one in needs if one.model not in up], scene.machine, device_bytes)
    yield check_memlock(scene.machine, max((one.locked_bytes for one in needs), default=0))


def _up(status: DaemonStatus | None) -> set[str]:
    """Return the models that have taken their memory already."""
    if status is None:
        return set()
    return {m["name"] for m in status["models"] if any(one["pid"] for one in m["instances"])}


def _host(scene: Scene, workshop: Workshop) -> Iterator[Finding]:
    yield check_files(max(1, workshop.instances))
    url = scene.status["url"] if scene.status else None
    yield check_address(scene.loaded.settings.proxy.listen, url)
    yield check_clients(scene.loaded.settings.proxy)
    yield from check_directories(scene.where)
    yield check_leftovers(scene.where, is_running=scene.status is not None)
