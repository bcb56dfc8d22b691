"""Commands that fetch the same file take turns."""

from __future__ import annotations

import glob
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import filelock

from supervisor.errors import DownloadFailed

_POLL_S: Final = 1.0
# The other command gives up after less: four waits of up to a minute without a byte.
_STALLED_S: Final = 600.0


@contextmanager
def turn(lock: Path, part: Path, name: str, notify: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a file during the block; wait while another command's part grows.

    The lock is huggingface_hub's own, so its commands wait too.

    Raises:
        DownloadFailed: The other command holds it and fetches nothing.
        OSError: The lock cannot be created.
    """
    lock.parent.mkdir(parents=True, exist_ok=True)
    held = filelock.FileLock(lock)
    _acquire(held, part, name, notify)
    try:
        yield
    finally:
        held.release()


def _acquire(
    held: filelock.BaseFileLock, part: Path, name: str, notify: Callable[[str], None]
) -> None:
    timeout_s, size_bytes, grew_at_s = 0.0, -1, time.monotonic()
    while True:
        try:
            held.acquire(timeout=timeout_s)
        except filelock.Timeout:
            if not timeout_s:
                notify(f"another command fetches {name}; waiting for it")
            timeout_s = _POLL_S
        else:
            return
        if (now_bytes := _size(part)) != size_bytes:
            size_bytes, grew_at_s = now_bytes, time.monotonic()
        elif time.monotonic() - grew_at_s > _STALLED_S:
            raise DownloadFailed(
                f"another command has held {name} for {_STALLED_S:.0f} s and fetched nothing",
                hint="end it, then run the same command again",
            )


def _size(part: Path) -> int:
    """The bytes of all parts of a file: huggingface_hub gives each process one of its own."""
    size_bytes = 0
    for one in part.parent.glob(f"{glob.escape(part.stem)}*{part.suffix}"):
        with suppress(FileNotFoundError):
            size_bytes += one.stat().st_size
    return size_bytes
