"""Free memory of devices as the engine lists it, which counts what other programs use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from supervisor.engines import discover
from supervisor.engines.discover import Device, Engine
from supervisor.errors import CorralError

# A listing takes 50 ms and more; one of this age will do to decide what to unload.
_FRESH_S: Final = 0.2
# Loads wait for it; a driver that takes longer says nothing.
_LIMIT_S: Final = 5.0


def _listed(engine: Engine) -> Sequence[Device]:
    return discover.list_devices(engine, _LIMIT_S)


class DeviceMemory:
    """The latest listing, and until when it may still grow.

    A driver may take seconds to give back the memory of a process that has ended.
    """

    def __init__(
        self,
        list_devices: Callable[[Engine], Sequence[Device]] = _listed,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._list_devices = list_devices
        self._clock = clock
        self._grows_until_s = self._read_at_s = float("-inf")
        self.free_bytes: Mapping[str, int] = {}

    @property
    def may_grow(self) -> bool:
        """Whether an engine has ended whose memory may yet come back."""
        return self._clock() < self._grows_until_s

    @property
    def is_fresh(self) -> bool:
        return self._clock() - self._read_at_s < _FRESH_S

    def note_exit(self, wait_s: float) -> None:
        """Note the end of an engine that used devices."""
        self._grows_until_s = max(self._grows_until_s, self._clock() + wait_s)

    async def read(self, engine: Engine) -> Mapping[str, int]:
        """List the devices again; return the free bytes of each, as far as they are known."""
        try:
            found = await asyncio.to_thread(self._list_devices, engine)
        except CorralError:  # nothing is known; the start reports what is wrong with the engine
            found = ()
        self.free_bytes, self._read_at_s = discover.free_bytes(found), self._clock()
        return self.free_bytes
