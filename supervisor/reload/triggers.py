"""What starts a reload: a command, SIGHUP, or a change of the settings file.

A command during a reload is rejected, as it can be repeated. A signal and a change of the file wait
for the reload that runs; several of them are one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Final

from proxy.failures import FAILURES, persist
from supervisor.errors import CorralError, DaemonBusy
from supervisor.fleet.launch_id import FileVersion
from supervisor.reload.reload import Reload, ReloadResult
from supervisor.settings.schema import ModelSettings

_CHECK_EVERY_S: Final = 2.0

Work = Callable[[], Awaitable[ReloadResult | CorralError]]


class ReloadTriggers:
    """Runs reloads while it is served; `applying` is open while one is applied."""

    def __init__(
        self,
        reload: Reload,
        applying: Callable[[], AbstractContextManager[None]] = nullcontext,
        *,
        check_every_s: float = _CHECK_EVERY_S,
    ) -> None:
        self._reload = reload
        self._applying = applying
        self._check_every_s = check_every_s
        self._file_version = self._current_version()
        self._is_scheduled = False
        self._woken = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None

    def start(self, *, dry_run: bool) -> asyncio.Task[ReloadResult | CorralError]:
        """Begin a reload, or a dry run of one; it is cancelled when serving ends.

        Raises:
            DaemonBusy: A reload runs already, or the daemon is stopping.
        """
        if self._reload.is_busy and self._group:
            raise DaemonBusy("a reload is already running", hint="retry when it is over")
        return self._begin(lambda: self._run(dry_run=dry_run))

    def add(self, models: Mapping[str, ModelSettings]) -> asyncio.Task[ReloadResult | CorralError]:
        """Begin to serve further models, after a reload that runs; otherwise as `start`."""
        return self._begin(lambda: self._reload.add(models))

    def schedule(self) -> None:
        """Reload as soon as no other reload runs."""
        self._is_scheduled = True
        self._woken.set()

    async def serve(self) -> None:
        """Run reloads until cancelled; a reload that runs then stops where it is."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                await persist("reload", self._watch)
            finally:
                self._group = None

    def _begin(self, work: Work) -> asyncio.Task[ReloadResult | CorralError]:
        if self._group is None:
            raise DaemonBusy("the daemon is stopping", hint="corral start starts another")
        return self._group.create_task(self._run_for_command(work), name="reload")

    async def _run_for_command(self, work: Work) -> ReloadResult | CorralError:
        try:
            return await work()
        except Exception as error:  # noqa: BLE001 (a task of the daemon outlives any failure)
            FAILURES.note("reload", error)
            return CorralError(f"the reload failed: {error!r}", hint="corral logs shows where")

    async def _watch(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._check_every_s if self._watches_file else None):
                    await self._woken.wait()
            self._woken.clear()
            is_changed = self._watches_file and self._current_version() != self._file_version
            if self._is_scheduled or is_changed:
                self._is_scheduled = False
                await self._run(dry_run=False)

    async def _run(self, *, dry_run: bool) -> ReloadResult | CorralError:
        if not dry_run:
            self._file_version = self._current_version()
        try:
            with nullcontext() if dry_run else self._applying():
                return await self._reload.run(dry_run=dry_run)
        finally:
            self._woken.set()  # watch_settings may have changed

    @property
    def _watches_file(self) -> bool:
        return self._reload.loaded.settings.supervisor.watch_settings

    def _current_version(self) -> FileVersion | None:
        path = self._reload.loaded.path
        return FileVersion.of(path) if path else None
