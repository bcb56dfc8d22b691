"""Why no slot file has a conversation."""

from __future__ import annotations

from enum import StrEnum


class NoFile(StrEnum):
    OFF = "off"
    """Its instance neither saves nor restores any."""
    COST = "cost"
    """Saving it did not pay when its slot was taken."""
    LIMIT = "limit"
    """The limits of the disk, or of writes in an hour, were reached."""
    DELETED = "deleted"
    """There was one: its age or the budget deleted it, or it could not be read."""
    OTHER_BUILD = "other_build"
    """There is one, of another build or other options."""
    FAILED = "failed"
    """There was one, and its restore failed."""
