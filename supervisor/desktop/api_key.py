"""The API key of a desktop backend: random for each daemon, in a file of its runtime directory."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from proxy.auth.keys_file import Key
from supervisor.host.files import write_atomic

# Not a name that a keys file may have.
_NAME: Final = "(desktop)"
_RANDOM_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class DesktopKey:
    path: Path
    secret: str = field(repr=False)

    @property
    def key(self) -> Key:
        return Key(_NAME, hashlib.sha256(self.secret.encode()).digest(), admin=True)

    @contextmanager
    def written(self) -> Iterator[None]:
        """Keep it in its file, mode 0600, for the block."""
        write_atomic(self.path, self.secret, durable=False)
        try:
            yield
        finally:
            self.path.unlink(missing_ok=True)


def new_desktop_key(path: Path) -> DesktopKey:
    return DesktopKey(path, f"corral-{secrets.token_hex(_RANDOM_BYTES)}")
