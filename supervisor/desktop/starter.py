"""The pipe from the host that started the daemon; it closes when that host has joined or died."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_READ_BYTES: Final = 4096


def is_starter_gone(descriptor: int) -> bool:
    """Whether the pipe is closed already."""
    poll = select.poll()
    poll.register(descriptor, 0)  # POLLHUP is always reported; source: poll(2)
    return any(found & select.POLLHUP for _, found in poll.poll(0))


@contextmanager
def starter_watched(descriptor: int, on_closed: Callable[[], None]) -> Iterator[None]:
    """Call `on_closed` when the pipe is closed within the block."""
    loop = asyncio.get_running_loop()

    def read() -> None:
        if not os.read(descriptor, _READ_BYTES):
            loop.remove_reader(descriptor)
            on_closed()

    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
