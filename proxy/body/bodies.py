"""Limits of all request bodies together: their memory, and one thread that parses large ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, Self, TypeVar

from proxy.errors import BodyMemoryFull
from proxy.settings import ProxySettings
from proxy.threads import worker_threads

# What is made of a body besides its bytes: decoded text, the bytes sent upstream, their buffer.
_COPIES: Final = 5
# A short string in a list; a list or an object is larger, and counts as several values.
_VALUE_BYTES: Final = 64
# Parsing a smaller body takes less than 20 ms of the event loop, whatever it holds.
_LARGE_BYTES: Final = 128 * 1024
# Parsing holds the GIL, so a second thread would only keep the event loop waiting longer.
_THREADS: Final = 1

_Result = TypeVar("_Result")


class Bodies:
    """The bodies in memory.

    The bodies of one client may take half of `body_memory_bytes`, so a client that sends many, or
    sends slowly, leaves room for others. A body may exceed these limits while it is the only one,
    of its client or of all: its own limits bound it.

    Attributes:
        held_bytes: Estimated memory of all bodies.
    """

    def __init__(self, settings: ProxySettings) -> None:
        self.settings = settings
        self.held_bytes = 0
        self.threads = worker_threads(_THREADS, "body")
        self._by_client: dict[str, int] = {}

    def share(self, client: str) -> Share:
        """A context manager that frees the memory; `client` is a key's name or an address."""
        return Share(self, client)

    def reserve(self, share: Share, size_bytes: int) -> None:
        """Raises: BodyMemoryFull: All bodies, or the client's, would exceed the limit."""
        limit_bytes = self.settings.body_memory_bytes
        held, of_client = self.held_bytes, self._by_client.get(share.client, 0)
        if held + size_bytes > limit_bytes and held != share.held_bytes:
            raise _full("all requests", limit_bytes)
        if of_client + size_bytes > limit_bytes // 2 and of_client != share.held_bytes:
            raise _full("one client's requests", limit_bytes // 2)
        self.held_bytes = held + size_bytes
        self._by_client[share.client] = of_client + size_bytes

    def release(self, share: Share) -> None:
        self.held_bytes -= share.held_bytes
        left = self._by_client.get(share.client, 0) - share.held_bytes
        if left:
            self._by_client[share.client] = left
        else:
            self._by_client.pop(share.client, None)

    def close(self) -> None:
        """End the thread; cancel the work that waits for it."""
        self.threads.shutdown(wait=False, cancel_futures=True)


class Share:
    """The memory reserved for one body, by estimate."""

    def __init__(self, bodies: Bodies, client: str) -> None:
        self.settings = bodies.settings
        self.client = client
        self.held_bytes = 0
        self._bodies = bodies

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bodies.release(self)

    def add_bytes(self, count: int) -> None:
        """Reserve memory for bytes of the body. Raises BodyMemoryFull."""
        self._add(count * _COPIES)

    def add_values(self, count: int) -> None:
        """Reserve memory for decoded values; raises as `add_bytes` does."""
        self._add(count * _VALUE_BYTES)

    async def run(self, size_bytes: int, work: Callable[[], _Result]) -> _Result:
        """Run `work` on a body; for a large one in the thread, without the event loop's state."""
        if size_bytes <= _LARGE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._bodies.threads, work)

    def _add(self, size_bytes: int) -> None:
        self._bodies.reserve(self, size_bytes)
        self.held_bytes += size_bytes


def _full(whose: str, limit_bytes: int) -> BodyMemoryFull:
    return BodyMemoryFull(
        f"the bodies of {whose} use all of their {limit_bytes} bytes of memory; "
        "retry later, or raise body_memory_bytes under [proxy]"
    )
