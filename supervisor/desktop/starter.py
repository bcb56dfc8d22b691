"""The pipe from the host that started the daemon; it closes when that host has joined or died."""

from __future__ import annotations

import asyncio
import os
import select
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_READ_BYTES: Final = 4096


@contextmanager
def exit_with_starter(descriptor: int) -> Iterator[None]:
    """Exit at once when the pipe is closed within the block, which must leave nothing behind."""
    done, end = os.pipe()
    thread = threading.Thread(target=_exit_when_closed, args=(descriptor, done))
    thread.start()
    try:
        yield
    finally:
        os.close(end)
        thread.join()
        os.close(done)


def _exit_when_closed(descriptor: int, done: int) -> None:
    poll = select.poll()
    for one in (descriptor, done):
        poll.register(one, 0)  # POLLHUP is always reported; source: poll(2)
    if descriptor in dict(poll.poll()):
        os._exit(0)


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
