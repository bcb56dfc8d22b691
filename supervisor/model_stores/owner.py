"""Whether another user could have written a model file that nobody named.

A GGUF is parsed by code in C++, and a file that shrinks while it is mapped kills its engine.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from supervisor.host.accounts import user_name

# Accounts of services, such as Ollama's own, have lower numbers. Source: login.defs(5), UID_MIN.
_PEOPLE_FROM: Final = 1000


def foreign_owner(path: Path) -> str | None:
    """Return why a file is another user's, as a clause; None if it is ours, root's or a service's.

    An unreadable one is left to its reader.
    """
    try:
        found = path.stat()
    except OSError:
        return None
    if found.st_uid != os.geteuid() and found.st_uid >= _PEOPLE_FROM:
        return f"it belongs to another user ({user_name(found.st_uid)}); serve it by its path"
    if found.st_mode & stat.S_IWOTH:
        return f"every user can write it (mode {stat.S_IMODE(found.st_mode):o})"
    return None
