"""Writes a bug report: one archive, mode 0600, without secrets, with prompts only on request."""

from __future__ import annotations

import io
import os
import platform
import re
import shutil
import sys
import tarfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from supervisor import __version__
from supervisor.errors import AccessDenied, DiskFull
from supervisor.system import machine
from supervisor.system.machine import cpu_name
from supervisor.system.paths import Directories


@dataclass(frozen=True, slots=True)
class Part:
    """A file of the report; `note` is a sentence about the lines left out."""

    name: str
    text: str
    note: str | None = None


HIDDEN: Final = "[hidden]"
# Shorter names, and these names, occur in ordinary words and paths.
_NAME_MIN: Final = 3
_COMMON: Final = frozenset({"root", "localhost", "user", "llama", "corral"})
_SECRET_MIN: Final = 6
_PASSWORD: Final = re.compile(r"://[^/@\s\"']{1,256}@")
# USER:PASSWORD@ without a scheme, as curl and git accept it.
_USER: Final = re.compile(r"(?<![\w.+/@-])[\w.+-]{1,64}:[^\s/@:\"']{1,256}@(?=\[?\w)")
# Options of llama-server and of other programs; `--api-key-file` names a file and is kept.
_OPTION: Final = re.compile(r"(--?[a-z][a-z-]{0,40}(?:key|token|password|secret))([ =])(?=\S)\S+")
_BEARER: Final = re.compile(r"\b(Bearer|Basic) [A-Za-z0-9._~+/=-]{6,}")
_KEY: Final = re.compile(r"\b(sk|hf|ghp|key)([-_])[A-Za-z0-9_-]{12,}")


@dataclass(frozen=True, slots=True)
class Anonymizer:
    """Removes secrets and personal names; `secrets`: further texts to hide, such as settings."""

    home: str
    user: str
    host: str
    secrets: Sequence[str] = ()

    def clean(self, text: str) -> str:
        for secret in sorted(self.secrets, key=len, reverse=True):
            if len(secret) >= _SECRET_MIN:
                text = text.replace(secret, HIDDEN)
        text = _PASSWORD.sub(f"://{HIDDEN}@", text)
        text = _USER.sub(f"{HIDDEN}@", text)
        text = _OPTION.sub(rf"\1\2{HIDDEN}", text)
        text = _BEARER.sub(rf"\1 {HIDDEN}", text)
        text = _KEY.sub(HIDDEN, text)
        if len(self.home) > 1:
            text = text.replace(self.home, "~")
        for name, instead in ((self.host, "HOST"), (self.user, "USER")):
            if len(name) >= _NAME_MIN and name.lower() not in _COMMON:
                text = re.sub(rf"(?<![^\W_]){re.escape(name)}(?![^\W_])", instead, text)
        return text


_SECRET: Final = re.compile(r"(?:^|[._-])(?:api[_-]?key|key|token|password|secret|header)s?$")
_TEXTS: Final = re.compile(r"\.variants\.|(?:^|\.)hooks\.|chat[-_]template|system[-_]prompt")


def without_secrets(
    values: Mapping[str, Any], origins: Mapping[str, str], *, with_prompts: bool
) -> list[str]:
    """Return `key = value  # origin` lines of the settings in `origins`, by dotted key.

    `with_prompts`: keep texts that become part of prompts.
    """
    return [
        f"{key} = {_report_value(key, value, with_prompts=with_prompts)!r}  # {origins[key]}"
        for key, value in values.items()
        if key in origins
    ]


def _report_value(key: str, value: Any, *, with_prompts: bool) -> Any:
    if isinstance(value, bool | int | float) or value is None:
        return value
    if _SECRET.search(key):
        return HIDDEN
    if _TEXTS.search(key) and not with_prompts:
        return HIDDEN
    return value


_DISTRIBUTION: Final = "llama-corral"


def machine_facts(where: Directories) -> dict[str, Any]:
    here = asdict(machine.read())
    here["cpu_flags"] = sorted(here["cpu_flags"])
    return {
        "system": platform.platform(),
        "distribution": _distribution(),
        "processor": cpu_name(),
        **here,
        "load_average": os.getloadavg(),
        "directories": {name: _directory(path) for name, path in asdict(where).items()},
    }


def versions() -> dict[str, str]:
    return {
        "llama-corral": __version__,
        "python": sys.version,
        **dict(sorted(_dependencies())),
    }


def _dependencies() -> Iterator[tuple[str, str]]:
    for line in metadata.requires(_DISTRIBUTION) or ():
        name = line.partition(";")[0].rstrip("0123456789.<>=!~, ")
        if "extra ==" not in line:
            try:
                yield name, metadata.version(name)
            except metadata.PackageNotFoundError:
                yield name, "missing"


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        return ""


def _directory(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"path": str(path), "exists": False}
    disk = shutil.disk_usage(path)
    mode = f"{path.stat().st_mode & 0o7777:o}"
    return {"path": str(path), "mode": mode, "disk_free_bytes": disk.free, "disk_bytes": disk.total}


_FLAGS: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def check_new(path: Path) -> None:
    """Raise AccessDenied if the path exists; called before the report is collected."""
    if path.exists():
        raise _exists(path)


def write_archive(path: Path, folder: str, parts: Sequence[Part]) -> int:
    """Write the parts below a folder; return the size in bytes.

    Raises AccessDenied if the path exists or cannot be created, or DiskFull.
    """
    descriptor = _create(path)
    try:
        with os.fdopen(descriptor, "wb") as file, tarfile.open(mode="w:gz", fileobj=file) as tar:
            for part in parts:
                content = part.text.encode(errors="replace")
                # Without the names of the user and the group.
                member = tarfile.TarInfo(f"{folder}/{part.name}")
                member.size, member.mode = len(content), 0o600
                member.mtime = int(time.time_ns() / 1e9)
                tar.addfile(member, io.BytesIO(content))
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
        raise _exists(path) from error
    except (OSError, ValueError) as error:
        raise AccessDenied(
            f"cannot write {path}: {getattr(error, 'strerror', None) or error}",
            hint="name a file in a directory that exists and is yours to write",
        ) from error


def _exists(path: Path) -> AccessDenied:
    return AccessDenied(f"{path} is there already", hint="name another file with --output")
