"""Where the beginning of a prompt can be found."""

from __future__ import annotations

from enum import StrEnum


class Tier(StrEnum):
    SLOT = "slot"
    """In the slot that the request got."""
    HOST_CACHE = "host_cache"
    """In no such slot: in what the engine keeps in main memory (`cache-ram`)."""
    DISK = "disk"
    """In a slot file, restored for the request or as the process began."""
    NONE = "none"
