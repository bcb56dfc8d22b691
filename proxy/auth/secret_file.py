"""Reads a file with a secret: owned by us or root, without access for others, as ssh requires.

A credential of a systemd service has an access list for its user, which looks like access of a
group; it lies in a directory that only this service sees. Source: systemd.exec(5),
`LoadCredential=`; acl(5), "Correspondence between ACL entries and file permission bits".
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from proxy.errors import ConfigError


def read_private(
    path: Path, what: str, max_bytes: int, *, missing: str, wrong: str
) -> tuple[bytes, os.stat_result]:
    """The content, and the stat of the file that was read.

    Args:
        what: What it is, for messages: `the keys file`.
        missing: Hint if it cannot be read.
        wrong: Hint if its content or type is wrong.

    Raises:
        ConfigError: It is missing, too large, another user's, or accessible to others.
    """

    def check(found: os.stat_result) -> None:
        _check_access(path, what, found)

    return _read(path, what, max_bytes, missing, wrong, check)


def read_public(path: Path, what: str, max_bytes: int, missing: str, wrong: str) -> bytes:
    """As `read_private`, but any user may own and read the file."""
    return _read(path, what, max_bytes, missing, wrong, lambda _: None)[0]


def _read(
    path: Path,
    what: str,
    max_bytes: int,
    missing: str,
    wrong: str,
    check: Callable[[os.stat_result], None],
) -> tuple[bytes, os.stat_result]:
    try:
        # O_NONBLOCK: a pipe in its place must not block us.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ConfigError(f"{what} {path} is not a regular file", wrong)
            check(found)
            text = file.read(max_bytes + 1)
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL character
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{what} {path} cannot be read: {reason}", missing) from error
    if len(text) > max_bytes:
        raise ConfigError(f"{what} {path} is larger than {_size(max_bytes)}", wrong)
    return text, found


def _check_access(path: Path, what: str, found: os.stat_result) -> None:
    mode = stat.S_IMODE(found.st_mode)
    if mode & (0o037 if _is_credential(path) else 0o077):
        reason = f"is open to others (mode {mode:o})"
        raise ConfigError(f"{what} {path} {reason}", f"chmod 600 {path}")
    if found.st_uid not in {os.geteuid(), 0}:
        raise ConfigError(f"{what} {path} belongs to another user", f"chown it: {path}")


def _is_credential(path: Path) -> bool:
    directory = os.environ.get("CREDENTIALS_DIRECTORY")
    return bool(directory) and path.parent == Path(directory or "")


def _size(count_bytes: int) -> str:
    return f"{count_bytes // 1024**2} MiB" if count_bytes >= 1024**2 else f"{count_bytes} bytes"
