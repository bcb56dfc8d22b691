"""The file that `corral capture` writes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, Final, Self

from supervisor.errors import AccessDenied

_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class CaptureFile:
    """A new file of mode 0600. Each line is written whole, or, on a full disk, not at all.

    Attributes:
        end: The members of the last line; None before it.
    """

    def __init__(self, path: Path) -> None:
        """Create the file; raises AccessDenied where that cannot be or something is there."""
        self.path = path.absolute()
        self.size_bytes = self.requests = self.responses = 0
        self.end: dict[str, Any] | None = None
        self._began_at_s = time.monotonic()
        try:
            self._descriptor = os.open(self.path, _FLAGS, 0o600)
        except FileExistsError as error:
            raise AccessDenied(
                f"{self.path} is there already", hint="name another file with --output"
            ) from error
        except (OSError, ValueError) as error:
            raise AccessDenied(
                f"cannot write {self.path}: {getattr(error, 'strerror', None) or error}",
                hint="name a file in a directory that exists and is yours to write",
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._began_at_s

    def write(self, line: bytes) -> None:
        """Append a line; an empty one only says that the daemon is there. Raises OSError."""
        if line == b"\n":
            return
        self._append(line)
        self.size_bytes += len(line)
        self.requests += line.startswith(b'{"type":"request"')
        self.responses += line.startswith(b'{"type":"response"')
        if line.startswith(b'{"type":"end"'):
            self.end = json.loads(line)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)

    def _append(self, line: bytes) -> None:
        view = memoryview(line)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError:
            os.ftruncate(self._descriptor, self.size_bytes)
            raise
