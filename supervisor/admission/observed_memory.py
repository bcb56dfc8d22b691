"""What instances really took, where that is more than was estimated.

Kept for each launch fingerprint, for the machine decides by it again and again: who runs the same
command on the same files takes the same. The most that was seen stands, as a cache that has filled
once will fill again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from supervisor.fleet.launch_id import LaunchFingerprint

# More launch fingerprints than a machine has in a year of reloads; the one that was asked for
# longest ago goes.
_KEPT: Final = 256


class ObservedMemory:
    """The most main memory of their own that instances of each launch fingerprint took."""

    def __init__(self, *, kept: int = _KEPT) -> None:
        self._kept = kept
        self._own_bytes: OrderedDict[str, int] = OrderedDict()

    def note(self, fingerprint: LaunchFingerprint, own_bytes: int) -> None:
        """Take in what an instance takes that it shares with no file (`devices.own_bytes`)."""
        key = _key(fingerprint)
        self._own_bytes[key] = max(own_bytes, self._own_bytes.get(key, 0))
        self._own_bytes.move_to_end(key)
        while len(self._own_bytes) > self._kept:
            self._own_bytes.popitem(last=False)

    def own_bytes(self, fingerprint: LaunchFingerprint) -> int:
        """Return the most that was seen; 0 for a launch fingerprint that never ran."""
        key = _key(fingerprint)
        if key in self._own_bytes:
            self._own_bytes.move_to_end(key)
        return self._own_bytes.get(key, 0)


def _key(fingerprint: LaunchFingerprint) -> str:
    flags = sorted(fingerprint.flags.items())
    stamps = (fingerprint.engine, fingerprint.model, fingerprint.draft)
    return repr((stamps, fingerprint.library_dirs, flags, fingerprint.args))
