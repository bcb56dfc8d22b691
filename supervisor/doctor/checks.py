"""Looks at everything, in the order in which a start needs it. Changes nothing, starts no model."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from supervisor import __version__
from supervisor.control.client import Client
from supervisor.control.messages import DaemonStatus
from supervisor.doctor.clients import check_clients
from supervisor.doctor.engine import check_engine
from supervisor.doctor.finding import Finding, failed, redact, secrets_of
from supervisor.doctor.host import (
    check_address,
    check_directories,
    check_files,
    check_leftovers,
    check_memlock,
)
from supervisor.doctor.models import Need, check_memory, check_models
from supervisor.engines.discover import Engine
from supervisor.errors import CorralError, DaemonBusy, EngineBroken, EngineMissing, NotRunning
from supervisor.fleet.planner import LaunchPlanner
from supervisor.host import machine
from supervisor.host.machine import Machine
from supervisor.host.paths import Directories
from supervisor.output import size
from supervisor.settings.load import Loaded, load
from supervisor.settings.schema import Settings


@dataclass(frozen=True, slots=True)
class Context:
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


def run_checks(config: Path | None, where: Directories) -> list[Finding]:
    """Look at everything, and return what was found, fit for anybody's eyes.

    Args:
        config: The settings file that was named, or None to look for it.
        where: Every directory.
    """
    loaded, about_settings = _settings(config, where)
    secrets = secrets_of(loaded.settings)
    found = [_system(machine.read()), about_settings, *_look(loaded, where)]
    return [redact(one, Path.home(), secrets) for one in found]


def _look(loaded: Loaded, where: Directories) -> Iterator[Finding]:
    planner = LaunchPlanner(loaded.settings, where)
    status, about_daemon = _daemon(where)
    yield about_daemon
    engine = None
    try:
        engine = planner.engine()
        yield from check_engine(engine)
    except (EngineMissing, EngineBroken) as error:
        yield failed("engine", error)
    context = Context(loaded, where, machine.read(), status, engine)
    if engine:
        yield from _models(context, planner)
    yield from _host(context, planner)


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


def _models(context: Context, planner: LaunchPlanner) -> Iterator[Finding]:
    needs = []
    for one in check_models(planner):
        if isinstance(one, Need):
            needs.append(one)
        else:
            yield one
    devices = context.engine.devices if context.engine else ()
    device_bytes = sum(device.total_mib for device in devices) << 20
    up = _up(context.status)
    yield check_memory([one for one in needs if one.model not in up], context.machine, device_bytes)
    yield check_memlock(context.machine, max((one.locked_bytes for one in needs), default=0))


def _up(status: DaemonStatus | None) -> set[str]:
    """Return the models that have taken their memory already."""
    if status is None:
        return set()
    return {m["name"] for m in status["models"] if any(one["pid"] for one in m["instances"])}


def _host(context: Context, planner: LaunchPlanner) -> Iterator[Finding]:
    yield check_files(max(1, planner.instances))
    url = context.status["url"] if context.status else None
    yield check_address(context.loaded.settings.proxy.listen, url)
    yield check_clients(context.loaded.settings.proxy)
    yield from check_directories(context.where)
    yield check_leftovers(context.where, is_running=context.status is not None)
