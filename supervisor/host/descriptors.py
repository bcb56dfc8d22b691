"""The limit of open files and sockets."""

from __future__ import annotations

import resource
from contextlib import suppress
from typing import Final

# Enough for any number of clients, and not so many that programs which close them all are slow.
_WANTED: Final = 65_536


def raise_descriptor_limit() -> None:
    """Raise the soft limit, mostly 1 024, as far as the hard limit allows.

    Source: getrlimit(2); systemd's notes on RLIMIT_NOFILE: it is low only for select(2).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # macOS has a maximum below the hard limit.
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
