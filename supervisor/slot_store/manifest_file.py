"""Reads a manifest from its file, whose time is that of the last use of its slot file."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from supervisor.host.paths import file_name, name_of_file
from supervisor.slot_store.manifest import Manifest, ManifestInvalid, load
from supervisor.slot_store.quarantine import QuarantinedFile


def read_manifest(path: Path) -> Manifest | QuarantinedFile | None:
    """Return a manifest, or why it is invalid; None if it is gone meanwhile."""
    try:
        found = load(path.read_text("utf-8"))
        used_at = datetime.fromtimestamp(path.stat().st_mtime_ns // 1000 / 1e6, tz=UTC)
    except FileNotFoundError:
        return None
    except (ManifestInvalid, OSError, UnicodeDecodeError) as error:
        return QuarantinedFile(name_of_file(path.parent.name), path.stem, str(error))
    if (found.name, file_name(found.model)) != (path.stem, path.parent.name):
        model = name_of_file(path.parent.name)
        return QuarantinedFile(model, path.stem, "its manifest is of another file")
    return replace(found, used_at=max(found.used_at, used_at))


def set_time(path: Path, when: datetime) -> None:
    """Make a manifest as old as the last use."""
    time_ns = 1000 * round(1e6 * when.timestamp())
    os.utime(path, ns=(time_ns, time_ns))
