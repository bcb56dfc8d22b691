"""Models that can be fetched by name, and those that were.

A fetched file appears under its final name only when it is whole and its SHA-256 is right: it is
written beside it, as `NAME.part`, and renamed. Whatever interrupts a fetch, running it again works:
the wheel it comes in is kept until the model was taken out of it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from supervisor.errors import AccessDenied, DownloadFailed, NoSuchModel
from supervisor.host.paths import make_ours, shipped

_CHUNK_BYTES: Final = 1024**2
_DOWNLOAD_TIMEOUT_S: Final = 3600
_LAST_WORDS: Final = 3

Progress = Callable[[str, int, int], None]
Download = Callable[[str, Path], None]


@dataclass(frozen=True, slots=True)
class Pin:
    """One file that can be fetched.

    Attributes:
        name: What people call it.
        description: What it is, in a sentence.
        package: The PyPI requirement of the wheel that carries it, `NAME==VERSION`.
        member: Its path inside the wheel.
        sha256: Its digest, in hex.
        size_bytes: Its size.
        license: Its SPDX licence.
    """

    name: str
    description: str
    package: str
    member: str
    sha256: str
    size_bytes: int
    license: str

    def path(self, models_dir: Path) -> Path:
        """Return where the fetched file stands."""
        return models_dir / Path(self.member).name


def pins() -> Mapping[str, Pin]:
    """Return every pinned model, by name."""
    text = (shipped("vendor") / "models.toml").read_text("utf-8")
    return {name: Pin(name=name, **fields) for name, fields in tomllib.loads(text).items()}


def find_pin(name: str) -> Pin:
    """Return a pinned model.

    Raises:
        NoSuchModel: None has this name.
    """
    known = pins()
    if name not in known:
        raise NoSuchModel(
            f"no pinned model is named {name!r}",
            hint=f"pinned are: {', '.join(known)}; any other GGUF is served by its path",
        )
    return known[name]


def is_fetched(pin: Pin, models_dir: Path) -> bool:
    """Tell whether the file is there, judged by its size; `fetch` also looks at its content."""
    path = pin.path(models_dir)
    return path.is_file() and path.stat().st_size == pin.size_bytes


def fetch(pin: Pin, models_dir: Path, progress: Progress, download: Download | None = None) -> Path:
    """Fetch a model, or find it there already, and return its path.

    Args:
        pin: What to fetch.
        models_dir: Where it goes; made when it is not there.
        progress: Told a stage (`download`, `unpack`, `verify`), what is done, and the whole, in
            bytes; the whole of a download is 0, because pip does not say.
        download: Puts the wheel of a requirement into a directory; None means with pip.

    Raises:
        DownloadFailed: It cannot be fetched, or is not what the pin says.
        AccessDenied: The directory cannot be written.
    """
    path = pin.path(models_dir)
    if is_fetched(pin, models_dir) and _digest(path, progress) == pin.sha256:
        return path
    wheels = models_dir / "wheels" / pin.name
    try:
        make_ours(models_dir)
        wheels.mkdir(parents=True, exist_ok=True)
        if _wheel(wheels) is None:
            progress("download", 0, 0)
            (download or _pip_download)(pin.package, wheels)
        _take_out(pin, _wheel(wheels), path, progress)
    except OSError as error:
        raise AccessDenied(
            f"cannot write in {models_dir}: {error.strerror or error}",
            hint="free some space, or set CORRAL_DATA_DIR to another directory",
        ) from error
    _remove(wheels)
    return path


def _take_out(pin: Pin, wheel: Path | None, path: Path, progress: Progress) -> None:
    if wheel is None:
        raise DownloadFailed(f"pip brought no wheel of {pin.package}")
    part = path.with_name(f"{path.name}.part")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(pin.member) as source:
            _copy(source, part, lambda done: progress("unpack", done, pin.size_bytes))
    except (zipfile.BadZipFile, KeyError) as error:
        wheel.unlink()
        raise DownloadFailed(
            f"{wheel.name} is damaged, or does not hold {pin.member}",
            hint="it was removed; run the same command again",
        ) from error
    if _digest(part, progress) != pin.sha256:
        part.unlink()
        wheel.unlink()
        raise DownloadFailed(
            f"{pin.member} from {pin.package} is not the pinned file: its SHA-256 differs",
            hint="it was removed; run the same command again",
        )
    part.replace(path)


def _copy(source: IO[bytes], target: Path, progress: Callable[[int], None]) -> None:
    with target.open("wb") as file:
        for chunk in _chunks(source):
            file.write(chunk)
            progress(file.tell())
        file.flush()
        os.fsync(file.fileno())


def _digest(path: Path, progress: Progress) -> str:
    digest, size_bytes, done_bytes = hashlib.sha256(), path.stat().st_size, 0
    with path.open("rb") as file:
        for chunk in _chunks(file):
            digest.update(chunk)
            done_bytes += len(chunk)
            progress("verify", done_bytes, size_bytes)
    return digest.hexdigest()


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    return iter(lambda: file.read(_CHUNK_BYTES), b"")


def _wheel(directory: Path) -> Path | None:
    return next(directory.glob("*.whl"), None)


def _remove(directory: Path) -> None:
    for file in directory.iterdir():
        file.unlink()
    directory.rmdir()


def _pip_download(package: str, directory: Path) -> None:
    """Have pip put one wheel into a directory; pip names it only when it is whole.

    Source: `pip download` moves finished files out of its own temporary directory.
    """
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    words += ["--no-deps", "--only-binary=:all:", "--dest", str(directory), package]
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise DownloadFailed(
            f"pip did not fetch {package} within an hour", hint="run the same command again"
        ) from error
    if done.returncode:
        said = "\n".join(done.stderr.strip().splitlines()[-_LAST_WORDS:])
        raise DownloadFailed(
            f"pip could not fetch {package}:\n{said}",
            hint="look at the network and pip's own settings, then run the same command again",
        )
