"""Chooses the draft model: the configured one, or one beside the model.

`draft = "auto"` takes the smallest GGUF in the model's directory that has its vocabulary and at
most a quarter of its size; of two of one size, the first by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from supervisor.errors import ModelInvalid, SettingsInvalid
from supervisor.gguf import metadata, vocabulary
from supervisor.gguf.metadata import Gguf
from supervisor.host.files import stat_regular

AUTO: Final = "auto"
# A draft model has to be much faster than its model.
_SMALLER: Final = 4
# Files examined, by name; a directory may hold all models of a machine.
_FILES_MAX: Final = 64

DraftSetting = Path | Literal["auto"] | None


@dataclass(frozen=True, slots=True)
class Draft:
    """The draft model, or a clause why there is none, and sentences on unreadable files."""

    gguf: Gguf | None = None
    reason: str = ""
    skipped: tuple[str, ...] = ()


def choose(setting: DraftSetting, model: Gguf, *, cache_dir: Path) -> Draft:
    """Choose the draft model. Reads files, or their cached metadata.

    Raises:
        ModelInvalid: The configured file cannot be read.
        SettingsInvalid: Its vocabulary differs, so that the engine would not draft with it.
    """
    if setting is None:
        return Draft()
    if not isinstance(setting, Path):
        return _beside(model, cache_dir)
    found = metadata.read(setting, cache_dir=cache_dir)
    reason = _misfit(found, model, cache_dir)
    if reason:
        raise SettingsInvalid(
            f"{setting} cannot draft for {model.path}: {reason}",
            hint='use a smaller model of the same family, or none; draft = "auto" looks for one',
        )
    return Draft(found)


def _beside(model: Gguf, cache_dir: Path) -> Draft:
    skipped: list[str] = []
    smaller = _smaller(model, cache_dir, skipped)
    fitting = [one for one in smaller if not _misfit(one, model, cache_dir)]
    if not fitting:
        where = model.path.parent
        reason = f"{where} has no GGUF of its vocabulary and at most a quarter of its size"
        return Draft(None, reason, tuple(skipped))
    best = min(fitting, key=lambda one: (one.tensor_bytes, one.path.name))
    among = f", of {len(fitting)} candidates" if len(fitting) > 1 else ""
    reason = f"the smallest GGUF of the same vocabulary beside the model{among}"
    return Draft(best, reason, tuple(skipped))


def _smaller(model: Gguf, cache_dir: Path, skipped: list[str]) -> Iterator[Gguf]:
    """The models that are small enough; unreadable files are noted in `skipped`."""
    for path in sorted(model.path.parent.glob("*.gguf"))[:_FILES_MAX]:
        if metadata.is_later_shard(path):
            continue
        try:
            if stat_regular(path).st_size * _SMALLER > model.size_bytes:
                continue
            found = metadata.read(path, cache_dir=cache_dir)
        except ModelInvalid as error:  # damaged, or incomplete
            skipped.append(f"not a draft for {model.path.name}: {error.message}")
        except OSError as error:
            skipped.append(f"not a draft for {model.path.name}: {path} {error.strerror}")
        else:
            if found.layers:  # a projector has none
                yield found


def _misfit(draft: Gguf, model: Gguf, cache_dir: Path) -> str | None:
    ours = vocabulary.read(model.path, cache_dir=cache_dir)
    return vocabulary.misfit(ours, vocabulary.read(draft.path, cache_dir=cache_dir))
