"""Implements `corral engine` (llama-server builds) and `corral worker` (one `ggml-rpc-server`)."""

from __future__ import annotations

import asyncio
import functools
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from supervisor.builds import discover, from_source, installed
from supervisor.builds.discover import Candidate, Engine, runtime_metadata
from supervisor.builds.help import Flag
from supervisor.builds.install import install as install_release
from supervisor.builds.releases import ReleaseApi, is_tag, new_client
from supervisor.builds.variant import choose, this_machine
from supervisor.daemon.model_commands import running_status
from supervisor.engine.orphans import WORKERS, private_runtime
from supervisor.errors import CorralError, EngineInUse, EngineMissing, SettingsInvalid, WorkerFailed
from supervisor.events import EventStream
from supervisor.output import (
    CommandResult,
    ProgressMeter,
    TransferMeter,
    duration,
    size,
    table,
    warn,
    write,
)
from supervisor.rpc.address import LOOPBACK, WorkerAddress, check_listen_host, free_port, probe
from supervisor.rpc.worker import Worker, WorkerOptions, worker_launch
from supervisor.settings.load import load
from supervisor.settings.schema import Settings
from supervisor.settings.tables import RestartPolicy
from supervisor.system import machine
from supervisor.system.download import HttpClient, PackageIndex, RemoteFile, package_index
from supervisor.system.paths import Directories, directories


def list_engines(config: Path | None) -> CommandResult:
    setting = load(config).settings.engine
    places = discover.default_search_paths(_engines())
    found = discover.list_engines(setting, cache_dir=directories().cache, places=places)
    if not found:
        load_engine(setting)
    notes: list[str] = []
    for candidate, engine in found:
        if isinstance(engine, CorralError):
            notes.append(f"{candidate.path}: {engine.message}")
        else:
            notes += filter(None, (engine.note, engine.warning))
    return CommandResult(
        [_data(*entry) for entry in found],
        table(("BUILD", "FROM", "NAME", "DEVICES", "PATH"), [_row(*entry) for entry in found]),
        tuple(notes),
    )


_PAST: Final = ("removed", "deprecated")


def path(config: Path | None) -> CommandResult:
    found = _load(config)
    return CommandResult({"path": str(found.path)}, str(found.path))


def show_help(name: str | None, config: Path | None) -> CommandResult:
    flags = _load(config).flags
    if name is None:
        rows = [
            (flag.names, flag.hint or "", next((word for word in _PAST if getattr(flag, word)), ""))
            for flag in flags.entries
        ]
        return CommandResult([*map(asdict, flags.entries)], table(("FLAG", "VALUE", ""), rows))
    flag = flags.find(name)
    if flag is None:
        near = flags.nearest(name)
        raise SettingsInvalid(
            f"this engine has no flag {name}",
            hint=f"did you mean {near}?" if near else "corral engine help lists them all",
        )
    return CommandResult(asdict(flag), _describe(flag))


def _load(config: Path | None) -> Engine:
    return load_engine(load(config).settings.engine)


def _engines() -> Path:
    return directories().engines


def load_engine(setting: installed.EngineSetting | None) -> Engine:
    """Return the engine of a setting or the first that is found; raises as `discover.load`."""
    places = discover.default_search_paths(_engines())
    return discover.load(setting, cache_dir=directories().cache, places=places)


def _row(candidate: Candidate, engine: Engine | CorralError) -> tuple[str, ...]:
    source, name = candidate.source, candidate.name or "-"
    if isinstance(engine, CorralError):
        return ("broken", source, name, "-", str(candidate.path))
    command = " ".join(engine.command)
    devices = [f"{device.name} {size(device.total_mib << 20)}" for device in engine.devices]
    return (str(engine.build or "?"), source, name, ", ".join(devices) or "CPU only", command)


def _data(candidate: Candidate, engine: Engine | CorralError) -> dict[str, object]:
    found = engine if isinstance(engine, Engine) else None
    return {
        "name": candidate.name,
        "path": str(found.path if found else candidate.path),
        "subcommand": found.subcommand if found else "",
        "source": candidate.source,
        **runtime_metadata(found),
        "build": found and found.build,
        "devices": [asdict(device) for device in found.devices] if found else [],
        "library_dirs": [str(directory) for directory in found.library_dirs] if found else [],
        "note": found and found.note,
        "warning": found and found.warning,
        "error": engine.as_json() if isinstance(engine, CorralError) else None,
    }


def _describe(flag: Flag) -> str:
    facts = {
        "value": flag.hint or "none",
        "choices": ", ".join(flag.choices),
        "default": flag.default,
        "environment": flag.env,
        "removed": flag.removed,
    }
    lines = [f"{label}: {text}" for label, text in facts.items() if text]
    return "\n".join([", ".join(flag.names), *lines, "", flag.help])


def use(name: str, config: Path | None) -> CommandResult:
    """Use a build for models without their own engine; raises EngineMissing, EngineBroken."""
    settings = load(config).settings
    build = installed.find_build(name, _engines())
    load_engine(build.name)
    with installed.lock_builds(_engines()):
        installed.use_build(build.name, _engines())
    return now_in_use(build.name, settings)


def rollback(config: Path | None) -> CommandResult:
    """Use the previous build; raises EngineMissing if there is none."""
    settings = load(config).settings
    with installed.lock_builds(_engines()):
        current = installed.roll_back(_engines()).current
    return now_in_use(current, settings)


def remove(name: str, config: Path | None) -> CommandResult:
    """Remove an installed build; raises EngineMissing, or EngineInUse if anything uses it."""
    build = installed.find_build(name, _engines())
    settings = load(config).settings
    with installed.lock_builds(_engines()):
        for reason, hint in _uses(build, settings):
            raise EngineInUse(f"{build.name} is not removed: {reason}", hint=hint)
        installed.remove_build(build, _engines())
    return CommandResult({"name": build.name}, f"removed {build.name}")


def _uses(build: installed.InstalledBuild, settings: Settings) -> Iterator[tuple[str, str]]:
    """Yield each use of a build, and how to end it."""
    if installed.read_in_use(_engines()).current == build.name:
        yield "it is the build in use", "corral engine use another one, or corral engine rollback"
    for key, setting in _settings(settings):
        if isinstance(setting, str) and _is_named(setting, build):
            yield f"the setting {key} names it", "change the setting, then run corral reload"
    status = running_status()
    files = _engines() / build.name
    for model in status.models if status else ():
        for instance in model.instances:
            if instance.pid and instance.engine and Path(instance.engine).is_relative_to(files):
                end = (
                    "it ends with its last answer" if instance.retiring else "corral reload ends it"
                )
                yield f"{instance.name} runs it", end


def _is_named(setting: str, build: installed.InstalledBuild) -> bool:
    try:
        return installed.find_build(setting, _engines()) == build
    except CorralError:
        return False


def _settings(settings: Settings) -> Iterator[tuple[str, installed.EngineSetting | None]]:
    yield "engine", settings.engine
    for name, model in settings.models.items():
        yield f"models.{name}.engine", model.engine
        if model.trial:
            yield f"models.{name}.trial.engine", model.trial.engine


def now_in_use(name: str | None, settings: Settings) -> CommandResult:
    """Show the engine that models without a setting run from now on."""
    text, path = f"in use: {name or 'no installed build'}", None
    notes = [
        f"the setting {key} = {setting} takes precedence"
        for key, setting in _settings(settings)
        if setting is not None
    ]
    if running_status():
        notes.append("corral reload applies it to the running daemon")
    try:
        path = str(load_engine(None).path)
    except CorralError as error:
        notes.append(f"it does not run: {error.message}")
    if path and name is None:
        text += f"; {path} is found instead"
    return CommandResult({"name": name, "path": path}, text, tuple(notes))


STABLE: Final = "stable"
NEWEST: Final = "newest"


def install(wanted: str, variant: str | None, config: Path | None) -> CommandResult:
    """Install a build; it is used if no other engine is found.

    Raises EngineMissing, DownloadFailed, DiskFull, AccessDenied, EngineBroken, or EnginesBusy if
    another command changes the installed builds.
    """
    settings = load(config).settings
    with installed.lock_builds(_engines()):
        build, is_new, notes = _install(wanted, variant, settings)
        return _show_installed(build, is_new=is_new, notes=notes)


def _show_installed(
    build: installed.InstalledBuild, *, is_new: bool, notes: tuple[str, ...] = ()
) -> CommandResult:
    """Use a build if no other engine is found, and show it; the caller holds the lock."""
    if next(discover.find(None, discover.default_search_paths(_engines())), None) is None:
        installed.use_build(build.name, _engines())
    is_used = installed.read_in_use(_engines()).current == build.name
    text = f"{'installed' if is_new else 'already installed:'} {build.name}"
    then = "in use" if is_used else f"corral engine use {build.name}"
    data = {**asdict(build), "path": str(build.path(_engines()))}
    return CommandResult({**data, "is_new": is_new}, f"{text} ({then})", notes)


def update(wanted: str, config: Path | None) -> CommandResult:
    """Install a newer build of the variant in use, and use it; other builds stay installed."""
    settings = load(config).settings
    with installed.lock_builds(_engines()):
        name, current = installed.read_in_use(_engines()).current, None
        with suppress(EngineMissing):
            current = installed.find_build(name, _engines()) if name else None
        variant = current.variant.partition("-")[0] if current else None
        build, _, notes = _install(wanted, variant, settings, newer_than=current)
        installed.use_build(build.name, _engines())
    shown = now_in_use(build.name, settings)
    if current == build:
        return replace(shown, text=f"{current.name} is up to date")
    text = shown.text + (f", was {current.name}" if current else "")
    return replace(shown, text=text, notes=(*notes, *shown.notes))


def _install(
    wanted: str,
    variant: str | None,
    settings: Settings,
    newer_than: installed.InstalledBuild | None = None,
) -> tuple[installed.InstalledBuild, bool, tuple[str, ...]]:
    """Install a build; return it, whether it is new, and notes.

    An installed build is kept, and so is `newer_than` if the wanted build is not newer.
    """
    if not (wanted in {STABLE, NEWEST} or is_tag(wanted)):
        raise EngineMissing(
            f"no build of llama.cpp is named {wanted!r}",
            hint=f"name a build such as b11434, a version such as v0.5.0, {STABLE} or {NEWEST}",
        )
    target, releases = this_machine(), settings.releases
    with new_client() as client:
        release = ReleaseApi(client, releases.api).find(wanted)
        if newer_than and (release.build or 0) <= newer_than.build:
            return newer_than, False, ()
        choice = choose(release, target, variant)
        if build := installed.read_build(_engines() / choice.name):
            return build, False, ()
        with TransferMeter() as meter:
            meter.note(f"{choice.name}, {choice.reason}; {size(choice.size_bytes)} to download")

            def show(stage: str, done: int, whole: int) -> None:
                name, _, file = stage.partition(" ")
                meter.show(file, name, done, whole)

            build, engine = install_release(
                choice, _engines(), HttpClient(client), releases.downloads, show
            )
    variant, notes = choice.engine.variant, []
    if variant != "cpu" and not engine.devices:
        notes.append(
            f"{choice.name} runs, but lists no device: it computes on the CPU until the driver "
            f"for {variant} is installed"
        )
    return build, True, tuple(notes)


def build(wanted: str, jobs: int | None, config: Path | None) -> CommandResult:
    """Compile a build and install it; it is used if no other engine is found.

    Raises EngineMissing without a compiler or such a package, and otherwise as `install`.
    """
    load(config)  # as the other commands: an error in it comes first
    tools = from_source.find_tools(jobs or from_source.default_jobs(machine.read()))
    with installed.lock_builds(_engines()), package_index() as index:
        number, source = from_source.find_source(wanted, index)
        there = installed.read_build(_engines() / f"b{number}-{from_source.VARIANT}")
        found = there or _compile(number, source, index, tools)
        return _show_installed(found, is_new=there is None)


_ESTIMATE_MIN_S: Final = 10.0


def _compile(
    number: int, source: RemoteFile, index: PackageIndex, tools: from_source.Tools
) -> installed.InstalledBuild:
    count = f"{tools.jobs} compiler{'' if tools.jobs == 1 else 's'} at a time"
    minutes = from_source.estimated_minutes(tools.jobs)
    write(
        f"b{number}: {size(source.size_bytes)} to download; compiling with {count} takes about "
        f"{minutes} min on a fast processor, and much longer on a small board",
        sys.stderr,
    )
    began_s: dict[str, float] = {}
    with ProgressMeter(sys.stderr) as meter:

        def show(stage: str, fraction: float) -> None:
            elapsed_s = time.monotonic() - began_s.setdefault(stage, time.monotonic())
            is_known = fraction > 0 and elapsed_s > _ESTIMATE_MIN_S
            left = f"{duration(elapsed_s / fraction - elapsed_s)} left" if is_known else ""
            meter.show(f"b{number}: {stage}", fraction, left)

        return from_source.compile_build(number, source, index, tools, _engines(), show)[0]


_PROBE_LIMIT_S = 1.0


def worker(options: WorkerOptions, config: Path | None) -> CommandResult:
    """Serve until SIGINT or SIGTERM.

    Raises SettingsInvalid if the address is public, WorkerFailed if the worker does not listen, and
    EngineMissing, EngineBroken or AccessDenied if it cannot be started.
    """
    import uvloop

    if warning := check_listen_host(options.host):
        warn(warning)
    where = directories()
    settings = load(config).settings
    engine = load_engine(settings.engine)
    host = LOOPBACK if options.host == "localhost" else options.host  # the program takes no names
    options = replace(options, host=host, port=options.port or _free_port(host))
    with private_runtime(where, WORKERS) as runtime:
        own = where.replace(runtime=runtime)
        _, dropped = worker_launch(engine, str(options.port), options, own)
        for clause in dropped:
            warn(f"{clause}; it is left out")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(engine, options, own, settings.supervisor.restart))
    return CommandResult(None)


def _free_port(host: str) -> int:
    try:
        return free_port(host)
    except OSError as error:
        raise WorkerFailed(
            f"a worker cannot listen on {host}: {error.strerror}",
            hint="`ip address` lists the addresses of this machine",
        ) from error


async def _serve(
    engine: Engine, options: WorkerOptions, where: Directories, policy: RestartPolicy
) -> None:
    from supervisor import log

    address = WorkerAddress(str(options.port), options.host, options.port)
    process = Worker(
        address,
        lambda: worker_launch(engine, address.name, options, where)[0],
        functools.partial(probe, engine, address, _PROBE_LIMIT_S),
        policy,
        EventStream(log.stream_sink(sys.stderr)).emit,
    )
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(process.serve())
        stopping = group.create_task(stop.wait())
        greeting = group.create_task(_greet(process))
        await asyncio.wait({serving, stopping, greeting}, return_when=asyncio.FIRST_COMPLETED)
        if greeting.done() and process.state == "ready":
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        for task in (serving, stopping, greeting):
            task.cancel()
    if not stop.is_set():
        raise _failure(process)


async def _greet(process: Worker) -> None:
    await process.wait_settled()
    if process.state != "ready":
        return
    offered = ", ".join(size(device.total_mib * 1024**2) for device in process.devices)
    write(
        f"worker ready at {process.address} ({offered or 'in use'}); to use it, in corral.toml:\n"
        f'  [workers.NAME]\n  address = "{process.address}"'
    )


def _failure(process: Worker) -> WorkerFailed:
    log = str(process.log_path) if process.log_path else None
    if process.cause is None:
        return WorkerFailed("the worker ended", log=log)
    text = f"the worker does not run: {process.cause.sentence}"
    return WorkerFailed(text, process.cause.hint, log)
