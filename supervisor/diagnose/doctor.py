"""Runs every check, in the order in which a start depends on it. Changes and starts nothing."""

from __future__ import annotations

import platform
import socket
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from supervisor import __version__
from supervisor.backend.proxy_settings import outside_addresses
from supervisor.builds.discover import Engine
from supervisor.daemon.control_client import Client
from supervisor.daemon.control_messages import (
    TOOLS_RUN,
    WITH_TOOLS_KEY,
    DaemonStatus,
    ModelStatus,
    WorkerStatus,
    failed_text,
)
from supervisor.diagnose import host_checks
from supervisor.diagnose.host_checks import Finding, failure_finding
from supervisor.errors import (
    AccessDenied,
    CorralError,
    DaemonBusy,
    EngineBroken,
    EngineMissing,
    NotRunning,
)
from supervisor.fleet.model import saved_room
from supervisor.fleet.planner import LaunchPlanner
from supervisor.output import size
from supervisor.plan import kv_cache
from supervisor.plan.plan import Plan
from supervisor.rpc.address import UNPROTECTED, KnownWorkers, WorkerAddress, check_port, probe
from supervisor.rpc.model_workers import address_of
from supervisor.rpc.worker import find
from supervisor.settings.load import Loaded, load
from supervisor.settings.schema import Settings
from supervisor.settings.tables import exposure
from supervisor.slot_store.store_config import SlotPersistence
from supervisor.system import machine
from supervisor.system.files import expand_home
from supervisor.system.machine import Machine
from supervisor.system.paths import Directories


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """Memory of a model, without compute buffers."""

    model: str
    weights_bytes: int  # of the tensors, which all replicas share
    cache_bytes: int  # the KV cache of all replicas
    locked_bytes: int = 0  # main memory to lock; 0 if the model does not ask for that
    is_preloaded: bool = True

    @property
    def bytes(self) -> int:
        return self.weights_bytes + self.cache_bytes


def check_models(
    planner: LaunchPlanner, *, can_read_slots: bool
) -> Generator[Finding, None, list[MemoryNeed]]:
    """Check the plans of all models; returns the memory that plannable models need."""
    needs = []
    if not planner.entries:
        fix = "corral start FILE.gguf serves a file; corral model get smollm2 fetches one"
        yield Finding("models", "ok", "none configured", fix)
    for name in planner.entries:
        try:
            plan = planner.plan(name)
        except CorralError as error:
            yield failure_finding(f"model {name}", error)
            continue
        yield from check_plan(plan)
        if reason := planner.launches.slot_persistence.reason(plan):
            text = f"conversations are not saved across restarts: {reason}"
            is_expected = not planner.launches.slot_persistence.problem
            yield Finding(f"model {name}", "ok" if is_expected else "warn", text)
        elif can_read_slots:
            yield _check_room(plan, planner.launches.slot_persistence)
        yield from _check_trial(planner, name)
        found = memory_need(plan, len(planner.replicas_of(name)))
        needs.append(replace(found, is_preloaded=planner.model_settings(name).preload))
    return needs


def _check_room(plan: Plan, persistence: SlotPersistence) -> Finding:
    try:
        budget = persistence.budget()
    except (OSError, AccessDenied) as error:
        return Finding(f"model {plan.model}", "warn", f"conversations are not saved: {error}")
    count, room = saved_room(plan, budget)
    return Finding(
        f"model {plan.model}",
        "ok" if count else "warn",
        f"conversations are saved across restarts: {room}",
        None if count else "raise slots_disk_budget, or free space on the disk",
    )


def _check_trial(planner: LaunchPlanner, name: str) -> Iterator[Finding]:
    if (trial := planner.trial(name)) is None:
        return
    try:
        planner.plan_trial(name, trial)
    except CorralError as error:
        yield failure_finding(f"trial of {name}", error)


def check_plan(plan: Plan) -> Iterator[Finding]:
    """Report on the plan of a model. A plan means that the file exists and is complete."""
    name, gguf = f"model {plan.model}", plan.gguf
    about = f"{gguf.architecture} {gguf.quantisation}, {size(gguf.size_bytes)}: {gguf.path}"
    yield Finding(name, "ok", f"{about}; {plan.slots} slots, {plan.ctx_size} tokens in all")
    for warning in plan.warnings:
        if warning != plan.engine.warning:  # check_engine reports that one
            fault, _, fix = warning.partition("; ")
            yield Finding(name, "warn", fault, fix or None)
    for line in plan.omitted:
        flag = f"{line.flag} {line.value or ''}".rstrip()
        yield Finding(name, "ok", f"runs without {flag} ({line.origin}): {line.reason}")


def memory_need(plan: Plan, replicas: int) -> MemoryNeed:
    cache = kv_cache.cache_bytes(plan.gguf, plan.memory_inputs.cache)
    weights = plan.gguf.tensor_bytes
    # The plan omits mlock if the limit forbids it; the model needs the limit raised all the same.
    flags = [f"{line.flag} {line.value}" for line in (*plan.lines, *plan.omitted)]
    is_locked = any("mlock" in flag for flag in flags) and not plan.engine.devices
    return MemoryNeed(plan.model, weights, cache * replicas, weights if is_locked else 0)


def check_memory(needs: Sequence[MemoryNeed], machine: Machine, device_bytes: int) -> Finding:
    """Compare the needs of models that are not loaded yet with the free memory.

    A model that can never fit is a failure; models that do not fit together take turns.
    `device_bytes`: memory of all devices; 0 if models run on the CPU.
    """
    whole, free = machine.memory_bytes, machine.memory_available_bytes
    available = f"{size(free)} of {size(whole)} are free"
    if device_bytes:
        whole = free = device_bytes
        available = f"the devices have {size(whole)}"
    if not needs:
        return Finding("memory", "ok", f"all models are loaded or none is configured; {available}")
    fix = "use a smaller model, ctx-size or replicas, or the profile low-memory"
    largest = max(needs, key=lambda need: need.bytes)
    if largest.bytes > whole and not device_bytes:  # the CPU runs layers that a device cannot hold
        text = f"weights and caches of {largest.model} take {size(largest.bytes)}; {available}"
        return Finding("memory", "fail", text, fix)
    preloaded = [need for need in needs if need.is_preloaded]
    wanted_bytes = sum(need.bytes for need in preloaded)
    text = "none is preloaded"
    if preloaded:
        parts = ", ".join(f"{need.model} {size(need.bytes)}" for need in preloaded)
        text = f"weights and caches take {size(wanted_bytes)} ({parts})"
        on_request = len(needs) - len(preloaded)
        text += f"; {on_request} more load on request" if on_request else ""
    if wanted_bytes > free:
        return Finding("memory", "warn", f"{text}; {available}", f"{fix}, or preload = false")
    return Finding("memory", "ok", f"{text}; {available}")


_TUNNEL: Final = "reach it through a tunnel (WireGuard, ssh -L), or at a private address"


def check_workers(
    settings: Settings, engine: Engine, status: DaemonStatus | None
) -> Iterator[Finding]:
    running = {worker.name: worker for worker in status.workers} if status else {}
    for name, worker_settings in settings.workers.items():
        address = address_of(name, worker_settings, KnownWorkers())
        check = _check_local_worker if worker_settings.local else _check_remote_worker
        yield check(address, engine, running.get(name))


def _check_local_worker(
    address: WorkerAddress, engine: Engine, found: WorkerStatus | None
) -> Finding:
    name = f"worker {address.name}"
    if found:
        return _check_running_worker(name, found)
    try:
        path, _ = find(engine)
        check_port(address)
    except CorralError as error:
        return failure_finding(name, error)
    except OSError as error:
        text = f"cannot listen on {address}: {(error.strerror or str(error)).lower()}"
        return Finding(name, "fail", text, "set another port, or 0 for any")
    return Finding(name, "ok", f"starts with the daemon: {path}")


def _check_remote_worker(
    address: WorkerAddress, engine: Engine, found: WorkerStatus | None
) -> Finding:
    name = f"worker {address.name}"
    try:
        reached = exposure(socket.gethostbyname(address.host))
    except (OSError, UnicodeError):  # the probe reports it
        reached = None
    if reached in {"public", "every"}:
        return Finding(name, "fail", f"{address} is a public address; {UNPROTECTED}", _TUNNEL)
    # A worker that serves the daemon's engine answers no other connection.
    if found and found.state == "ready" and found.models:
        return _check_running_worker(name, found)
    try:
        devices = probe(engine, address)
    except CorralError as error:
        return failure_finding(name, error)
    memory = size(sum(device.total_mib for device in devices) * 1024**2)
    note = "; unencrypted, so the network must be trusted" if reached != "loopback" else ""
    return Finding(name, "ok", f"{address} answers: {memory}{note}")


def _check_running_worker(name: str, found: WorkerStatus) -> Finding:
    if found.reason:
        return Finding(name, "fail", f"{found.state}: {found.reason}", found.hint)
    used = f", for {', '.join(found.models)}" if found.models else ""
    return Finding(name, "ok", f"{found.state} at {found.address}{used}")


def check_tools(settings: Settings) -> Iterator[Finding]:
    """Yield a finding for each model whose engines may run tools for clients."""
    addresses = " and ".join(outside_addresses(settings.proxy))
    has_keys = settings.proxy.api_keys_file is not None
    who = WITH_TOOLS_KEY if has_keys else "without a key"
    text, fix = f"for programs of this machine {who}", "unset engine_tools if no client uses it"
    if addresses:
        others = f"other machines reach {addresses}, and so the tools {who}"
        text = f"DANGER: {others}" if has_keys else f"{text}; other machines need a key"
        fix = "listen on 127.0.0.1, or unset engine_tools"
    text = f"engine_tools is on: {TOOLS_RUN}; {text}"
    for name, model in settings.models.items():
        if model.engine_tools:
            yield Finding(f"tools of {name}", "warn", text, fix)


def run_checks(config: Path | None, where: Directories) -> list[Finding]:
    """Return all findings, redacted for publication; `config`: None searches for the file."""
    try:
        loaded = load(config, config_dir=where.config)
        settings = Finding("settings", "ok", str(loaded.path or "no settings file; defaults"))
    except CorralError as error:
        loaded, settings = Loaded(Settings(), None, {}), failure_finding("settings", error)
    here = machine.read()
    is_valid = settings.level == "ok"
    found = [_system_finding(here), settings, *_findings(loaded, where, here, is_valid=is_valid)]
    secrets = host_checks.secrets_of(loaded.settings)
    return [host_checks.redact(finding, expand_home(Path("~")), secrets) for finding in found]


def _findings(
    loaded: Loaded, where: Directories, here: Machine, *, is_valid: bool
) -> Iterator[Finding]:
    planner = LaunchPlanner(loaded.settings, where)
    status, daemon = _check_daemon(where)
    yield daemon
    if status:
        yield from check_failed(status.models)
    can_read_slots = True
    if shared := loaded.settings.supervisor.slots_directory:
        found = host_checks.check_slots_directory(shared)
        can_read_slots = found.level != "fail"
        yield found
    try:
        engine = planner.engine()
    except (EngineMissing, EngineBroken) as error:
        yield failure_finding("engine", error)
    else:
        yield from host_checks.check_engine(engine)
        yield from _model_findings(planner, engine, status, here, can_read_slots=can_read_slots)
        yield from check_workers(loaded.settings, engine, status)
    instances = [found for model in status.models for found in model.instances] if status else []
    engines = [instance.pid for instance in instances if instance.pid]
    yield host_checks.check_processor([status.pid, *engines] if status else [])
    yield host_checks.check_files(max(1, planner.instances))
    if is_valid:  # or the default address would be checked, which others may use
        url = status.url if status else None
        yield host_checks.check_address(loaded.settings.proxy.listen, url)
    yield host_checks.check_clients(loaded.settings.proxy)
    yield from check_tools(loaded.settings)
    yield from host_checks.check_hooks(loaded)
    yield from host_checks.check_traces(loaded.settings.proxy.tracing)
    yield from host_checks.check_directories(where)
    yield host_checks.check_leftovers(where, is_running=status is not None)


def _system_finding(here: Machine) -> Finding:
    versions = f"llama-corral {__version__}, Python {platform.python_version()}"
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    hardware = f"{describe_cores(here)}, {size(here.memory_bytes)}"
    return Finding("system", "ok", f"{versions}, {system}, {hardware}")


def describe_cores(here: Machine) -> str:
    """Describe the cores; efficiency cores, a quota and NUMA nodes only if there are any."""
    slow = f" ({here.efficiency_cores} of them efficiency cores)" if here.efficiency_cores else ""
    nodes = f", {here.numa_nodes} NUMA nodes" if here.numa_nodes > 1 else ""
    spare = f", {here.quota_spare_cores} more cores beyond the CPU quota"
    quota = spare if here.quota_spare_cores else ""
    return f"{here.physical_cores} cores{slow}, {here.logical_cores} threads{quota}{nodes}"


def _check_daemon(where: Directories) -> tuple[DaemonStatus | None, Finding]:
    try:
        status = Client(where.control_socket).status()
    except NotRunning:
        return None, Finding("daemon", "ok", "not running")
    except DaemonBusy as error:
        return None, failure_finding("daemon", error)
    states = [
        f"{instance.name} {instance.state}" for m in status.models for instance in m.instances
    ]
    text = f"running, version {status.version}: {', '.join(states) or 'no models'}"
    return status, Finding("daemon", "ok", text)


def check_failed(models: Iterable[ModelStatus]) -> Iterator[Finding]:
    """Yield a finding for each instance that is not restarted any more."""
    for instance in [found for model in models for found in model.instances]:
        if (text := failed_text(instance)) and (error := instance.error):
            fix = f"{error['hint']}; {text}" if error["hint"] else text
            yield Finding(f"instance {instance.name}", "fail", error["message"], fix)


def _model_findings(
    planner: LaunchPlanner,
    engine: Engine,
    status: DaemonStatus | None,
    here: Machine,
    *,
    can_read_slots: bool,
) -> Iterator[Finding]:
    needs = yield from check_models(planner, can_read_slots=can_read_slots)
    models = status.models if status else []
    running = {model.name for model in models if any(instance.pid for instance in model.instances)}
    device_bytes = sum(device.total_mib for device in engine.devices) << 20
    yield check_memory([need for need in needs if need.model not in running], here, device_bytes)
    yield host_checks.check_memlock(here, max((need.locked_bytes for need in needs), default=0))
