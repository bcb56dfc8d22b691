"""Let a process compute for a share of the time only: it is stopped for the rest of every 10 ms.

Words: the process, and the share. Ends with its own parent, or with the process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

PERIOD_S: Final = 0.01


@contextmanager
def slowed_down(pid: int, share: float) -> Iterator[None]:
    """Slow a process down for the length of the block."""
    slow_down = subprocess.Popen([sys.executable, __file__, str(pid), str(share)])
    try:
        yield
    finally:
        slow_down.kill()
        slow_down.wait()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def main() -> None:
    pid, share, parent = int(sys.argv[1]), float(sys.argv[2]), os.getppid()
    try:
        while os.getppid() == parent:
            os.kill(pid, signal.SIGSTOP)
            time.sleep(PERIOD_S * (1 - share))
            os.kill(pid, signal.SIGCONT)
            time.sleep(PERIOD_S * share)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    main()
