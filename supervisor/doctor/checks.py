"""Runs every check in the order in which a start depends on it; changes and starts nothing."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Iterator
from pathlib import Path

from supervisor import __version__
from supervisor.control.client import Client
from supervisor.control.messages import DaemonStatus, ModelStatus
from supervisor.control.state_text import failed_text
from supervisor.doctor.engine import check_engine
from supervisor.doctor.finding import Finding, failed, redact, secrets_of
from supervisor.doctor.hooks import check_hooks
from supervisor.doctor.host import (
    check_address,
    check_clients,
    check_directories,
    check_files,
    check_leftovers,
    check_memlock,
)
from supervisor.doctor.models import MemoryNeed, check_memory, check_models
from supervisor.doctor.processor import check_processor
from supervisor.doctor.traces import check_traces
from supervisor.doctor.workers import check_workers
from supervisor.engines.discover import Engine
from supervisor.errors import CorralError, DaemonBusy, EngineBroken, EngineMissing, NotRunning
from supervisor.fleet.planner import LaunchPlanner
from supervisor.host import machine
from supervisor.host.files import expanded
from supervisor.host.machine import Machine
from supervisor.host.paths import Directories
from supervisor.output import size
from supervisor.settings.load import Loaded, load
from supervisor.settings.schema import Settings


def run_checks(config: Path | None, where: Directories) -> list[Finding]:
    """Return all findings, redacted so that they can be published.

    Args:
        config: The settings file that was named, or None to search for it.
        where: All directories.
    """
    loaded, settings = _settings(config, where)
    here = machine.read()
    found = [_system(here), settings, *_findings(loaded, where, here)]
    secrets = secrets_of(loaded.settings)
    return [redact(one, expanded(Path("~")), secrets) for one in found]


def _findings(loaded: Loaded, where: Directories, here: Machine) -> Iterator[Finding]:
    planner = LaunchPlanner(loaded.settings, where)
    status, daemon = _daemon(where)
    yield daemon
    if status:
        yield from check_failed(status["models"])
    try:
        engine = planner.engine()
    except (EngineMissing, EngineBroken) as error:
        yield failed("engine", error)
    else:
        yield from check_engine(engine)
        yield from _models(planner, engine, status, here)
        yield from check_workers(loaded.settings, engine, status)
    yield check_processor(_own_pids(status))
    yield check_files(max(1, planner.places.instances))
    yield check_address(loaded.settings.proxy.listen, status["url"] if status else None)
    yield check_clients(loaded.settings.proxy)
    yield from check_hooks(loaded)
    yield from check_traces(loaded.settings.proxy.tracing)
    yield from check_directories(where)
    yield check_leftovers(where, is_running=status is not None)


def _settings(config: Path | None, where: Directories) -> tuple[Loaded, Finding]:
    try:
        loaded = load(config, config_dir=where.config)
    except CorralError as error:
        return Loaded(Settings(), None, {}), failed("settings", error)
    return loaded, Finding("settings", "ok", str(loaded.path or "no settings file; defaults"))


def _system(here: Machine) -> Finding:
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return Finding(
        "system",
        "ok",
        f"llama-corral {__version__}, Python {platform.python_version()}, {system}, "
        f"{describe_cores(here)}, {size(here.memory_bytes)}",
    )


def describe_cores(here: Machine) -> str:
    """Describe the cores; what an ordinary machine lacks is not mentioned."""
    slow = f" ({here.efficiency_cores} of them efficiency cores)" if here.efficiency_cores else ""
    nodes = f", {here.numa_nodes} NUMA nodes" if here.numa_nodes > 1 else ""
    beyond = f", {here.quota_spare_cores} more cores beyond the CPU quota"
    quota = beyond if here.quota_spare_cores else ""
    return f"{here.physical_cores} cores{slow}, {here.logical_cores} threads{quota}{nodes}"


def _daemon(where: Directories) -> tuple[DaemonStatus | None, Finding]:
    try:
        status = Client(where.control_socket).status()
    except NotRunning:
        return None, Finding("daemon", "ok", "not running")
    except DaemonBusy as error:
        return None, failed("daemon", error)
    states = [f"{one['name']} {one['state']}" for m in status["models"] for one in m["instances"]]
    text = f"running, version {status['version']}: {', '.join(states) or 'no models'}"
    return status, Finding("daemon", "ok", text)


def check_failed(models: Iterable[ModelStatus]) -> Iterator[Finding]:
    """Yield the instances that are not restarted any more."""
    for instance in [found for model in models for found in model["instances"]]:
        if (text := failed_text(instance)) and (error := instance["error"]):
            fix = f"{error['hint']}; {text}" if error["hint"] else text
            yield Finding(f"instance {instance['name']}", "fail", error["message"], fix)


def _own_pids(status: DaemonStatus | None) -> list[int]:
    if status is None:
        return []
    engines = (one["pid"] for model in status["models"] for one in model["instances"])
    return [status["pid"], *filter(None, engines)]


def _models(
    planner: LaunchPlanner, engine: Engine, status: DaemonStatus | None, here: Machine
) -> Iterator[Finding]:
    needs = []
    for one in check_models(planner):
        if isinstance(one, MemoryNeed):
            needs.append(one)
        else:
            yield one
    models = status["models"] if status else []
    running = {model["name"] for model in models if any(one["pid"] for one in model["instances"])}
    device_bytes = sum(device.total_mib for device in engine.devices) << 20
    yield check_memory([one for one in needs if one.model not in running], here, device_bytes)
    yield check_memlock(here, max((one.locked_bytes for one in needs), default=0))
