"""How many files and sockets the daemon may have open."""

from __future__ import annotations

import resource
from contextlib import suppress
from typing import Final

# Enough for any number of clients; engines inherit it, and some programs visit each number.
_WANTED: Final = 65_536


def raise_descriptor_limit() -> None:
    """Raise the soft limit as far as the hard limit allows; it is 1 024 on most systems.

    Source: getrlimit(2); systemd's notes on RLIMIT_NOFILE, which keep the soft limit low only for
    programs that use select(2).
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # macOS refuses more than its own maximum, whatever the hard limit says.
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
