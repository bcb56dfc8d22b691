"""Searches the hub for the dashboard, and downloads models from it, by `corral` commands."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

from attrs import define, field

from proxy.dashboard.host import Download, PinnedModel
from proxy.errors import Conflict, NotFound, Unavailable, quote
from supervisor.backend import ollama
from supervisor.backend.ollama import command_envelope, proxy_error
from supervisor.builds.discover import Device
from supervisor.errors import CorralError, EngineBroken, EngineMissing
from supervisor.fleet.fleet import Fleet
from supervisor.models.pinned import Pin, is_fetched, pins
from supervisor.plan.fit import capacity
from supervisor.system import machine

_RUNNING_MAX: Final = 4
_KEPT: Final = 16


@define(eq=False, slots=False)
class HubAdapter:
    """Implements `Hub`; downloads go on without a page, and end with the daemon."""

    _fleet: Fleet
    _models_dir: Path
    _downloads: dict[str, Download] = field(factory=dict, init=False)
    _tasks: dict[str, asyncio.Task[None]] = field(factory=dict, init=False)
    _queries: asyncio.Semaphore = field(
        factory=partial(asyncio.Semaphore, _RUNNING_MAX), init=False
    )

    async def search(self, words: str) -> list[dict[str, Any]]:
        found = await self._query(["model", "search"], words)
        room_bytes = await asyncio.to_thread(self._room_bytes)
        return [
            {
                **repository,
                "quantisations": [
                    {"name": name, "size_bytes": size_bytes, "fits": size_bytes <= room_bytes}
                    for name, size_bytes in repository["quantisations"].items()
                ],
            }
            for repository in found
        ]

    async def fit(self, name: str) -> dict[str, object]:
        wanted = str(ollama.hub_reference(name))
        found = await self._query(["model", "get", "--dry-run"], wanted)
        return {
            "name": found["name"],
            "fits": found["warning"] is None,
            "fit": found["warning"] or found["reason"],
        }

    async def _query(self, words: Sequence[str], argument: str) -> Any:
        async with self._queries:
            try:
                return (await command_envelope(words, argument))["data"]
            except CorralError as error:
                raise proxy_error(error) from error

    def pinned(self) -> list[PinnedModel]:
        return [
            PinnedModel(pin.name, pin.description, pin.size_bytes, pin.license)
            for pin in self._pins.values()
            if not is_fetched(pin, self._models_dir)
        ]

    def downloads(self) -> Sequence[Download]:
        return [*self._downloads.values()]

    def download(self, name: str) -> None:
        shown = name if name in self._pins else str(ollama.hub_reference(name))
        if shown in self._tasks:
            raise Conflict(f"{shown} is being downloaded already")
        if len(self._tasks) >= _RUNNING_MAX:
            raise Unavailable(f"{_RUNNING_MAX} downloads are running; retry later", 10)
        try:
            task = self._fleet.spawn(self._run(shown))
        except CorralError as error:
            raise proxy_error(error) from error
        self._downloads.pop(shown, None)
        self._downloads[shown] = Download(shown)
        self._tasks[shown] = task
        ended = [key for key in self._downloads if key not in self._tasks]
        for old in ended[: max(0, len(self._downloads) - _KEPT)]:
            del self._downloads[old]

    def cancel(self, name: str) -> None:
        if (task := self._tasks.get(name)) is None:
            raise NotFound(f"no download of {quote(name)} is running")
        task.cancel()

    async def _run(self, name: str) -> None:
        try:
            async with aclosing(ollama.download(name)) as steps:
                async for step in steps:
                    self._note(
                        name,
                        file=step.file,
                        done_bytes=step.completed_bytes,
                        size_bytes=step.total_bytes,
                    )
            self._note(name, state="done")
        except CorralError as error:
            text = f"{error.message}; {error.hint}" if error.hint else error.message
            self._note(name, state="failed", error=text)
        except asyncio.CancelledError:
            self._note(name, state="cancelled")
            raise
        finally:
            del self._tasks[name]

    @cached_property
    def _pins(self) -> Mapping[str, Pin]:
        return pins()

    def _note(self, name: str, **changes: Any) -> None:
        self._downloads[name] = replace(self._downloads[name], **changes)

    def _room_bytes(self) -> int:
        """Return the memory of this machine and its devices that models may take."""
        planner, devices = self._fleet.planner, tuple[Device, ...]()
        with suppress(EngineMissing, EngineBroken):
            devices = planner.engine().devices
        has = capacity(machine.read(), devices, planner.supervisor.memory_budget)
        return has.host + sum(has.devices.values())
