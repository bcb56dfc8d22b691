"""Worker threads that take no signals that end a process."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor


def worker_threads(count: int | None, name: str) -> ThreadPoolExecutor:
    """Make a pool whose threads leave signals to the main thread.

    While a daemon exits, the main thread blocks signals to replace their handlers; in any other
    thread the default action, which kills the process, could still take effect.
    """
    return ThreadPoolExecutor(count, thread_name_prefix=name, initializer=_block_signals)


def _block_signals() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
