"""How much of a file the page cache of Linux holds.

Source: mincore(2); Linux, mm/mincore.c: of files that the caller neither owns nor may write, all
pages count as held, so nothing is known of them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from contextlib import closing
from pathlib import Path

_IS_LINUX = sys.platform == "linux"


def held_bytes(path: Path) -> int | None:
    """Return the bytes of a file in the page cache; None if that is unknown. 30 ms for each GB."""
    if not _IS_LINUX or not os.access(path, os.W_OK):
        return None
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            # A private mapping may be written, which ctypes asks for; that copies no page.
            with closing(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)) as mapped:
                return min(size, _held_pages(mapped, size) * mmap.PAGESIZE)
    except (OSError, ValueError):  # it is gone, or empty
        return None


def _held_pages(mapped: mmap.mmap, size: int) -> int:
    states = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    begin = ctypes.c_ubyte.from_buffer(mapped)
    try:
        result = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(begin)), ctypes.c_size_t(size), states
        )
    finally:
        del begin  # a mapping with a pointer into it cannot be closed
    if result:
        raise OSError(ctypes.get_errno(), "mincore")
    return bytes(states).translate(_LOWEST).count(1)


# Other bits of a state are reserved.
_LOWEST = bytes(number & 1 for number in range(256))
