"""When settings are reloaded: asked by a command, told by a signal, or seen in the file.

A command that asks while a reload is under way is refused, for it can ask again. A signal and a
change of the file have nobody to tell, so they wait for their turn, and many of them are one.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from supervisor.errors import CorralError, DaemonBusy
from supervisor.failures import FAILURES, persist
from supervisor.fleet.launch_id import FileVersion
from supervisor.fleet.planner import file_version
from supervisor.reload.reload import Reload, ReloadResult

_LOOK_EVERY_S: Final = 2.0


class ReloadTriggers:
    """Runs reloads while it is served.

    Args:
        reload: What it runs.
        look_every_s: Seconds between looks at the settings file, where these are wanted.
    """

    def __init__(self, reload: Reload, *, look_every_s: float = _LOOK_EVERY_S) -> None:
        self._reload = reload
        self._look_every_s = look_every_s
        self._seen = self._look()
        self._is_told = False
        self._poked = asyncio.Event()
        self._group: asyncio.TaskGroup | None = None

    def ask(self, *, dry_run: bool) -> asyncio.Task[ReloadResult | CorralError]:
        """Begin a reload, or to find out what one would do; cancelled when serving ends.

        Raises:
            DaemonBusy: A reload is under way, or the daemon ends.
        """
        if self._group is None:
            raise DaemonBusy("the daemon is ending", hint="corral start starts another")
        if self._reload.is_busy:
            raise DaemonBusy("a reload is under way", hint="ask again when it is over")
        return self._group.create_task(self._asked(dry_run=dry_run), name="reload")

    def tell(self) -> None:
        """Have the settings reloaded as soon as no other reload is under way."""
        self._is_told = True
        self._poked.set()

    async def serve(self) -> None:
        """Run what was asked for, until cancelled; a reload under way then ends where it is."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                await persist("reload", self._hear)
            finally:
                self._group = None

    async def _asked(self, *, dry_run: bool) -> ReloadResult | CorralError:
        """Run a reload for a command, which is told of any failure."""
        try:
            return await self._run(dry_run=dry_run)
        except Exception as error:  # noqa: BLE001 (a task of the daemon outlives any failure)
            FAILURES.note("reload", error)
            return CorralError(f"the reload failed: {error!r}", hint="corral logs shows where")

    async def _hear(self) -> None:
        while True:
            await self._pause()
            if self._is_told or (self._is_wanted and self._look() != self._seen):
                self._is_told = False
                await self._run(dry_run=False)

    async def _pause(self) -> None:
        """Wait for a poke, or for the time of the next look where looks are wanted."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._look_every_s if self._is_wanted else None):
                await self._poked.wait()
        self._poked.clear()

    async def _run(self, *, dry_run: bool) -> ReloadResult | CorralError:
        if not dry_run:
            self._seen = self._look()
        try:
            return await self._reload.run(dry_run=dry_run)
        finally:
            self._poked.set()  # looks may be wanted now, or no more

    @property
    def _is_wanted(self) -> bool:
        return self._reload.loaded.settings.supervisor.watch_settings

    def _look(self) -> FileVersion | None:
        path = self._reload.loaded.path
        return file_version(path) if path else None
