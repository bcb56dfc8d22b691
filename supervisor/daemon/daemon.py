"""Runs the parts of the daemon, and shuts them down in order.

A shutdown (SIGINT, SIGTERM, control socket) drains the proxy, then stops the engines. A second
request shortens the wait to 5 s, a third ends it. SIGHUP reloads the settings.
"""

from __future__ import annotations

import asyncio
import functools
import math
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from typing import Final

from proxy.common.background_tasks import FAILURES, persist, worker_threads
from proxy.errors import ListenFailed
from supervisor import __version__
from supervisor.daemon import control_server
from supervisor.daemon.control_messages import ADD_KEY
from supervisor.daemon.desktop import STARTER, DesktopHosts, watch_starter
from supervisor.daemon.operations import DaemonService
from supervisor.daemon.parts import DaemonParts
from supervisor.engine.orphans import kill_orphans
from supervisor.errors import AccessDenied
from supervisor.fleet import cache_commands
from supervisor.settings.tables import STOP_LIMIT_S as HOOKS_STOP_LIMIT_S
from supervisor.slot_store.store_config import clean_up
from supervisor.system.daemon_lock import lock_runtime_dir, this_daemon, write_owner

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)
# Time left after the second and the third request to shut down.
_FORCED_DRAIN_S: Final = (5.0, 0.0)


class Daemon:
    """One daemon; construct it on a running loop and `run` it once."""

    def __init__(self, parts: DaemonParts) -> None:
        self.parts = parts
        self._directories = parts.directories
        self._events = parts.events
        self._notifier = parts.notifier
        emit = parts.events.emit
        FAILURES.report_to(emit)
        self._hosts: DesktopHosts | None = None
        if parts.desktop_key:
            leave = functools.partial(self.shutdown, "the last desktop host has left")
            self._hosts = DesktopHosts(emit, leave)
        self.service = DaemonService(
            self.parts,
            lambda: (self._now_s() - self._started_at_s, self._shutdown_requests > 0),
            self.shutdown,
            self._hosts,
        )
        self._started_at_s = self._stopping_at_s = self._now_s()
        self._shutdown_requests = 0
        self._shutdown = asyncio.Event()
        self._drain_timeout: asyncio.Timeout | None = None

    async def run(self, models: Sequence[str], report: Callable[[], None]) -> None:
        """Start models and serve until shutdown; `report` once clients and commands are answered.

        Raises CorralError if another daemon runs, a directory or the address cannot be used, or a
        model is not configured.
        """
        control = control_server.serve(self.service, self._events, self._directories.control_socket)
        for name in models:
            self.parts.fleet.planner.entry(name)
        with lock_runtime_dir(self._directories), self._signal_handlers():
            asyncio.get_running_loop().set_default_executor(worker_threads(None, "worker"))
            if addresses := self.parts.keyless:
                # Before anything else: other machines can send requests without a key.
                self._events.emit("daemon.open", keyless=" ".join(addresses), hint=ADD_KEY)
            kill_orphans(self._directories.runtime, self._events.emit)
            clean_up(self.parts.fleet.planner.launches.slot_persistence, self._events.emit)
            async with self._listen(), control, self._run_parts():
                if models:
                    self.parts.admission.command("start", models)
                self._emit_started()
                report()
                self._notifier.note_start()
                lose = functools.partial(self._hosts.lose, STARTER) if self._hosts else None
                with watch_starter(sys.stdin.fileno(), lose) if lose else nullcontext():
                    await self._shutdown.wait()
            self.parts.fleet.planner.launches.slot_persistence.store.close()

    @asynccontextmanager
    async def _run_parts(self) -> AsyncIterator[None]:
        """Run all parts; after the block, stop reloads, drain requests and stop engines.

        During the drain, models are still loaded for requests in flight.
        """
        parts = self.parts
        tasks: dict[str, list[asyncio.Task[None]]] = {"drain": [], "stop": [], "end": []}

        def cancel(until: str) -> None:
            for task in tasks[until]:
                task.cancel()

        async with asyncio.TaskGroup() as group:
            for serve in (parts.fleet.serve, parts.router.run, parts.nodes.serve):
                tasks["end"].append(group.create_task(serve()))
            for part in parts.parts:
                if part.task:
                    serving = group.create_task(persist(part.task, part.serve))
                    tasks[part.serves_until].append(serving)
            tasks["drain"].append(group.create_task(persist("jobs", parts.server.serve)))
            tasks["drain"].append(group.create_task(parts.reload.serve()))
            yield
            cancel("drain")
            await self._drain()
            await parts.usage.settle()
            cancel("stop")
            await self._stop()
            cancel("end")

    @asynccontextmanager
    async def _listen(self) -> AsyncIterator[None]:
        server = self.parts.server
        try:
            await server.start()
        except ListenFailed as error:
            raise AccessDenied(error.message, hint=error.hint) from error
        key = self.parts.desktop_key
        try:
            with key.write() if key else nullcontext():
                owner = this_daemon(__version__, server.url, key.path if key else None)
                write_owner(self._directories.state_file, owner)
                yield
        finally:
            await server.close()

    def _emit_started(self) -> None:
        path = self.parts.reload.loaded.path
        self._events.emit(
            "daemon.started",
            version=__version__,
            url=self.parts.server.url,
            control=str(self._directories.control_socket),
            settings=str(path) if path else None,
        )

    async def _drain(self) -> None:
        """Let requests in flight finish; abort those that take too long.

        The next turns of other conversations already go to other daemons, which may share files,
        or copy them. With sockets that outlive this process, its successor has the files.
        """
        limit_s = self.parts.settings.supervisor.drain_timeout_s
        limit_s = min(limit_s, self._hosts.drain_max_s if self._hosts else math.inf)
        fleet, exchange = self.parts.fleet, self.parts.slot_exchange
        are_copied = exchange.hands_over and not self._notifier.sockets
        async with self._deadline(limit_s), asyncio.TaskGroup() as group:
            draining = group.create_task(self.parts.server.drain(limit_s))
            if are_copied:
                await exchange.hand_over()
            if are_copied or fleet.planner.launches.slot_persistence.store.shared:
                await cache_commands.save_until_idle(fleet.all_replicas(), self.parts.router)
            await draining
            if are_copied:
                await exchange.hand_over()
        await self.parts.server.close()

    async def _stop(self) -> None:
        """Save slots, stop the engines, and wait for hooks."""
        limits = self.parts.settings.supervisor
        self.parts.fleet.command("stop")
        saving_s = limits.slot_save_timeout_s if limits.persist_slots else 0
        async with self._deadline(2 * limits.stop_timeout_s + saving_s):
            await self.parts.fleet.all_down()
            await self.parts.fleet.slot_files.settle()
        async with self._deadline(HOOKS_STOP_LIMIT_S):
            await self.parts.hooks.runner.finish()
        duration_s = round(self._now_s() - self._stopping_at_s, 3)
        self._events.emit("daemon.stopped", duration_s=duration_s)

    @asynccontextmanager
    async def _deadline(self, limit_s: float) -> AsyncIterator[None]:
        """Limit the duration of the block; repeated shutdown requests shorten it."""
        is_over = self._shutdown_requests > len(_FORCED_DRAIN_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(0 if is_over else limit_s) as self._drain_timeout:
                yield
        self._drain_timeout = None

    def shutdown(self, reason: str) -> None:
        """Begin to shut down; a repeated call shortens the wait."""
        self._shutdown_requests += 1
        if self._shutdown_requests == 1:
            self._stopping_at_s = self._now_s()
            self._events.emit("daemon.stopping", reason=reason)
            self._shutdown.set()
        elif self._drain_timeout and not self._drain_timeout.expired():
            left_s = _FORCED_DRAIN_S[min(self._shutdown_requests - 2, len(_FORCED_DRAIN_S) - 1)]
            self._drain_timeout.reschedule(self._now_s() + left_s)

    @contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.shutdown, f"{number.name} received")
        loop.add_signal_handler(signal.SIGHUP, self.parts.reload.schedule)
        try:
            yield
        finally:
            _ignore_signals(loop)

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()


def _ignore_signals(loop: asyncio.AbstractEventLoop) -> None:
    """Ignore signals from now on, so that the process exits with code 0.

    Signals are blocked during the change (and always in worker threads): when the loop removes a
    handler, it restores the default action, which would kill the process.
    """
    numbers = {*_SIGNALS, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    for number in numbers:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
