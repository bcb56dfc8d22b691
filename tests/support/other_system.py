"""Runs the command line as on a system without Linux's interfaces: no pidfds, no resource limits,
no users and groups, no signal when a pipe is closed.

    python tests/support/other_system.py serve
"""

import fcntl
import os
import signal
import sys
from contextlib import suppress

import psutil  # noqa: F401 (on Linux it needs the modules that are taken away here)

_MISSING = (
    (os, "pidfd_open"),
    (os, "sched_getaffinity"),
    (signal, "pidfd_send_signal"),
    (fcntl, "F_SETSIG"),
)

if __name__ == "__main__":
    # An import of a module that is None fails.
    sys.modules.update(dict.fromkeys(("resource", "pwd", "grp")))  # type: ignore[arg-type]
    for module, name in _MISSING:
        with suppress(AttributeError):  # this system may not have it either
            delattr(module, name)
    from supervisor.cli.app import main

    main()
