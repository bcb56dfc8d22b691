"""Implements `corral worker`: one `ggml-rpc-server` in the foreground."""

from __future__ import annotations

import asyncio
import functools
import signal
import sys
from dataclasses import replace
from pathlib import Path

from supervisor.builds.discover import Engine
from supervisor.cli.engine import load_engine
from supervisor.engine.orphans import WORKERS, private_runtime
from supervisor.errors import WorkerFailed
from supervisor.events import EventStream
from supervisor.output import CommandResult, size, warn, write
from supervisor.rpc.address import LOOPBACK, WorkerAddress, check_listen_host, free_port, probe
from supervisor.rpc.worker import Worker, WorkerOptions, worker_launch
from supervisor.settings.load import load
from supervisor.settings.tables import RestartPolicy
from supervisor.system.paths import Directories, directories

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
    settings = load(config, config_dir=where.config).settings
    engine = load_engine(settings.engine, where)
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
