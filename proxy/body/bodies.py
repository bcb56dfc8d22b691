"""What all request bodies together may take: memory, and the thread that parses the large ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, TypeVar

from proxy.errors import BodyMemoryFull
from proxy.settings import ProxySettings

# What is made of a body beside its bytes: decoded text, the bytes sent upstream, their buffer.
_COPIES: Final = 5
# A short string in a list; a list or an object is more, and counts as several values.
_VALUE_BYTES: Final = 64
# Below, parsing on the loop takes less than 20 ms whatever the bytes are.
_LARGE_BYTES: Final = 128 * 1024
# What parses holds the interpreter, so a second one would only keep the loop waiting longer.
_THREADS: Final = 1

_Result = TypeVar("_Result")


class Share:
    """The memory that one body takes, by estimate; made by `Bodies.share`.

    Attributes:
        settings: The limits that the body has to keep.
        held_bytes: How much memory it takes.
    """

    def __init__(self, bodies: Bodies, settings: ProxySettings) -> None:
        self.settings = settings
        self._bodies = bodies
        self.held_bytes = 0

    def add_bytes(self, count: int) -> None:
        """Take what so many bytes of a body will need.

        Raises:
            BodyMemoryFull: All bodies together would take too much.
        """
        self._add(count * _COPIES)

    def add_values(self, count: int) -> None:
        """Take what so many decoded values will need.

        Raises:
            BodyMemoryFull: All bodies together would take too much.
        """
        self._add(count * _VALUE_BYTES)

    async def run(self, size_bytes: int, work: Callable[[], _Result]) -> _Result:
        """Return what `work` makes of a body; see `Bodies.run`."""
        return await self._bodies.run(size_bytes, work)

    def _add(self, size_bytes: int) -> None:
        self._bodies.take(self, size_bytes)
        self.held_bytes += size_bytes


class Bodies:
    """The bodies that are in memory.

    A body that is alone may take more than all may take together: its own limits bound it.

    Args:
        settings: The limits of each, and of all together.

    Attributes:
        held_bytes: What they take now, by estimate.
    """

    def __init__(self, settings: ProxySettings) -> None:
        self._settings = settings
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="body")
        self.held_bytes = 0

    @contextmanager
    def share(self) -> Iterator[Share]:
        """Give one request what its body needs, for the length of the block."""
        share = Share(self, self._settings)
        try:
            yield share
        finally:
            self.held_bytes -= share.held_bytes

    def take(self, share: Share, size_bytes: int) -> None:
        """Take memory for a share.

        Raises:
            BodyMemoryFull: All bodies together would take too much.
        """
        is_alone = self.held_bytes == share.held_bytes
        limit_bytes = self._settings.body_memory_bytes
        if self.held_bytes + size_bytes > limit_bytes and not is_alone:
            raise BodyMemoryFull(limit_bytes)
        self.held_bytes += size_bytes

    async def run(self, size_bytes: int, work: Callable[[], _Result]) -> _Result:
        """Return what `work` makes of a body; in a thread, one after the other, where it is large.

        Args:
            size_bytes: The size of the body.
            work: Touches nothing that the loop changes meanwhile.
        """
        if size_bytes <= _LARGE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def close(self, _app: object = None) -> None:
        """End the thread; what waits for it is given up."""
        self._threads.shutdown(wait=False, cancel_futures=True)
