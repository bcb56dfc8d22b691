"""Remembers for which caches putting them back was in vain: a small file beside the slot store.

It is read whenever it is asked, so a command may drop what a daemon wrote. What cannot be read is
as if it were not there: then it is found out once more.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Final

from supervisor.host.files import write_atomic
from supervisor.host.paths import make_private
from supervisor.slot_store.manifest import CacheKey

_MOST: Final = 64
_SIZE_MAX_BYTES: Final = 64 * 1024


class IneffectiveRestores:
    """The identities to which nothing is restored any more, the latest 64 of them.

    Args:
        path: The file, 0600; its directory is made when first written to.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def __contains__(self, identity: CacheKey) -> bool:
        return _digest(identity) in self._read()

    def add(self, model: str, identity: CacheKey) -> None:
        """Remember one; the oldest leaves for it where there are too many.

        Args:
            model: By the name in the settings, under which it may be forgotten.
            identity: What was disproved.

        Raises:
            OSError, AccessDenied: The disk refused; nothing was remembered.
        """
        known = self._read()
        known.pop(digest := _digest(identity), None)
        self._write({**known, digest: model})

    def forget(self, model: str | None = None) -> None:
        """Forget those of a model, or all.

        Raises:
            OSError: The disk refused.
        """
        known = self._read()
        left = {digest: its for digest, its in known.items() if model not in {None, its}}
        if left:
            self._write(left)
        else:
            self._path.unlink(missing_ok=True)

    def _read(self) -> dict[str, str]:
        """Return the models by the digests of their identities, the oldest first."""
        with suppress(OSError, ValueError, RecursionError):
            if self._path.stat().st_size > _SIZE_MAX_BYTES:
                return {}
            found = json.loads(self._path.read_bytes())
            if isinstance(found, dict) and all(isinstance(its, str) for its in found.values()):
                return found
        return {}

    def _write(self, known: dict[str, str]) -> None:
        make_private(self._path.parent)
        write_atomic(self._path, json.dumps(dict(list(known.items())[-_MOST:]), indent=1))


def _digest(identity: CacheKey) -> str:
    return hashlib.sha256(json.dumps(asdict(identity), sort_keys=True).encode()).hexdigest()
