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
        client: Whose it is.
        held_bytes: How much memory it takes.
    """

    def __init__(self, bodies: Bodies, settings: ProxySettings, client: str) -> None:
        self.settings = settings
        self.client = client
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

    Those of one client may take half of what all may, so that one that sends its bodies slowly, or
    many of them, leaves room for others. A body that is alone, of its client or of all, may take
    more: its own limits bound it.

    Args:
        settings: The limits of each, and of all together.
    """

    def __init__(self, settings: ProxySettings) -> None:
        self._settings = settings
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="body")
        self._by_client: dict[str, int] = {}

    @property
    def held_bytes(self) -> int:
        """What they take now, by estimate."""
        return sum(self._by_client.values())

    @contextmanager
    def share(self, client: str) -> Iterator[Share]:
        """Give one request what its body needs, for the length of the block.

        Args:
            client: Whose it is: the name of an API key, or an address.
        """
        share = Share(self, self._settings, client)
        try:
            yield share
        finally:
            self._give_back(share)

    def take(self, share: Share, size_bytes: int) -> None:
        """Take memory for a share.

        Raises:
            BodyMemoryFull: All bodies together, or those of the client, would take too much.
        """
        limit_bytes = self._settings.body_memory_bytes
        of_client = self._by_client.get(share.client, 0)
        for held, limit, whose in (
            (self.held_bytes, limit_bytes, "all requests"),
            (of_client, limit_bytes // 2, "one client's requests"),
        ):
            if held + size_bytes > limit and held != share.held_bytes:
                raise BodyMemoryFull(
                    f"the bodies of {whose} use all of their {limit} bytes of memory; "
                    "retry later, or raise body_memory_bytes under [proxy]"
                )
        self._by_client[share.client] = of_client + size_bytes

    def _give_back(self, share: Share) -> None:
        left = self._by_client.get(share.client, 0) - share.held_bytes
        if left:
            self._by_client[share.client] = left
        else:
            self._by_client.pop(share.client, None)

    async def run(self, size_bytes: int, work: Callable[[], _Result]) -> _Result:
        """Return what `work` makes of a body; in a thread, one after the other, where it is large.

        Args:
            size_bytes: The size of the body.
            work: Touches nothing that the loop changes meanwhile.
        """
        if size_bytes <= _LARGE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """End the thread; what waits for it is given up."""
        self._threads.shutdown(wait=False, cancel_futures=True)
