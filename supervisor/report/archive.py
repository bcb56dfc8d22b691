"""Writes a report: one tar.gz that only its user can read, whole or not at all."""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from supervisor.errors import AccessDenied, DiskFull
from supervisor.report.part import Part

_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def check_new(path: Path) -> None:
    """Raise AccessDenied where something is there already: before a report is gathered for it."""
    if path.exists():
        raise _is_there(path)


def write_archive(path: Path, folder: str, parts: Sequence[Part]) -> int:
    """Write the parts below a folder; return the size in bytes.

    Raises:
        AccessDenied: Something is there already, or the file cannot be made.
        DiskFull: It does not fit.
    """
    descriptor = _create(path)
    try:
        with os.fdopen(descriptor, "wb") as file, tarfile.open(mode="w:gz", fileobj=file) as tar:
            for part in parts:
                _add(tar, f"{folder}/{part.name}", part.text.encode(errors="replace"))
    except OSError as error:
        path.unlink(missing_ok=True)
        raise DiskFull(
            f"cannot write {path}: {error.strerror}", hint="name a file on another disk"
        ) from error
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path.stat().st_size


def _create(path: Path) -> int:
    try:
        return os.open(path, _FLAGS, 0o600)
    except FileExistsError as error:
        raise _is_there(path) from error
    except (OSError, ValueError) as error:
        raise AccessDenied(
            f"cannot write {path}: {getattr(error, 'strerror', None) or error}",
            hint="name a file in a directory that exists and is yours to write",
        ) from error


def _is_there(path: Path) -> AccessDenied:
    return AccessDenied(f"{path} is there already", hint="name another file with --output")


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # without the names of the user and the group
    member.size, member.mode, member.mtime = len(content), 0o600, int(_now_s())
    tar.addfile(member, io.BytesIO(content))


def _now_s() -> float:
    return time.time_ns() / 1e9
