"""A file with a secret in it: ours or root's, and closed to everybody else, as ssh has it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from proxy.errors import ConfigError


def read_private(
    path: Path, what: str, max_bytes: int, *, missing: str, wrong: str
) -> tuple[bytes, os.stat_result]:
    """Read a file that nobody else may read.

    Args:
        path: The file.
        what: What it is, as in `the keys file`.
        max_bytes: Largest size taken.
        missing: What to do where it cannot be read.
        wrong: What to do where it is no such file.

    Returns:
        All of it, and what was true of it as it was read.

    Raises:
        ConfigError: It is not there, is too large, is another user's, or others may read it.
    """
    try:
        # A pipe in its place must not hold us up.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            _check_access(path, what, found, wrong)
            text = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:  # a path with a NUL character is the latter
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{what} {path} cannot be read: {reason}", missing) from error
    if len(text) > max_bytes:
        raise ConfigError(f"{what} {path} is larger than {_size(max_bytes)}", wrong)
    return text, found


def _check_access(path: Path, what: str, found: os.stat_result, wrong: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{what} {path} is no regular file", wrong)
    mode = stat.S_IMODE(found.st_mode)
    if mode & 0o077:
        raise ConfigError(f"{what} {path} is open to others (mode {mode:o})", f"chmod 600 {path}")
    if found.st_uid not in {os.geteuid(), 0}:
        raise ConfigError(f"{what} {path} belongs to another user", f"chown it: {path}")


def _size(count_bytes: int) -> str:
    return f"{count_bytes // 1024**2} MiB" if count_bytes >= 1024**2 else f"{count_bytes} bytes"
