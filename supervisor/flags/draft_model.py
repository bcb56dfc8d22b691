"""Chooses the draft model: the configured one, or one beside the model.

`draft = "auto"` takes draft heads of this model in its directory, or in `MTP` below; without any,
the smallest GGUF that has its vocabulary and at most a quarter of its size; of two of one size, the
first by name. A profile whose `spec-type` is `auto` takes draft heads without that setting.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

from supervisor.errors import ModelInvalid, SettingsInvalid
from supervisor.flags.draft_heads import draft_type, head_misfit
from supervisor.gguf import metadata, vocabulary
from supervisor.gguf.metadata import Gguf
from supervisor.host.files import stat_regular

AUTO: Final = "auto"
# A draft model has to be much faster than its model.
_SMALLER: Final = 4
# Of a draft model that the user sets; a larger one hardly pays.
_SHARE_MAX: Final = 0.5
# Files examined, by name; a directory may hold all models of a machine.
_FILES_MAX: Final = 64
# Where repositories keep draft heads, such as unsloth's.
_DRAFT_DIRECTORIES: Final = ("MTP", "mtp")

DraftSetting = Path | Literal["auto"] | None


@dataclass(frozen=True, slots=True)
class Draft:
    """The draft model, or a clause why there is none, and sentences for the user."""

    gguf: Gguf | None = None
    reason: str = ""
    warnings: tuple[str, ...] = ()


def choose(
    setting: DraftSetting,
    model: Gguf,
    *,
    cache_dir: Path,
    spec_types: Collection[str] = (),
    takes_heads: bool = False,
) -> Draft:
    """Choose the draft model. Reads files, or their cached metadata.

    Args:
        setting: What the user set.
        model: The model to draft for.
        cache_dir: Of the metadata.
        spec_types: Ways of drafting that the build has.
        takes_heads: Whether draft heads beside the model are taken where nothing is set.

    Raises:
        SettingsInvalid: Its vocabulary differs, so that the engine would not draft with it.
    """
    if isinstance(setting, Path):
        return _configured(setting, model, cache_dir)
    if setting is None and (not takes_heads or model.draft_layers):
        return Draft()
    skipped: list[str] = []
    beside = _beside(model, cache_dir, skipped)
    fitting = [one for one in beside if not _misfit(one, model, cache_dir)]
    heads = [one for one in fitting if one.drafts_for and draft_type(one) in spec_types]
    if heads:
        return Draft(_smallest(heads), "draft heads of this model beside it", tuple(skipped))
    if setting is None:
        return Draft()
    return replace(_smaller_model(model, fitting), warnings=tuple(skipped))


def _configured(path: Path, model: Gguf, cache_dir: Path) -> Draft:
    try:
        found = metadata.read(path, cache_dir=cache_dir)
    except ModelInvalid as error:
        reason = error.message.replace("model file", "its file", 1)
        return Draft(reason=reason, warnings=(f"the model runs without its draft model: {reason}",))
    if misfit := _misfit(found, model, cache_dir):
        raise SettingsInvalid(
            f"{path} cannot draft for {model.path}: {misfit}",
            hint='use a smaller model of the same family, or none; draft = "auto" looks for one',
        )
    share = found.tensor_bytes / model.tensor_bytes if model.tensor_bytes else 0
    if found.drafts_for or share <= _SHARE_MAX:
        return Draft(found)
    warning = (
        f"the draft model {path.name} has {share:.0%} of its model's size, and drafting pays "
        "only if it is much faster: take one of a quarter or less"
    )
    return Draft(found, warnings=(warning,))


def _smaller_model(model: Gguf, fitting: Sequence[Gguf]) -> Draft:
    small = [
        one
        for one in fitting
        if not one.drafts_for and one.size_bytes * _SMALLER <= model.size_bytes
    ]
    if not small:
        where = model.path.parent
        reason = f"{where} has no GGUF of its vocabulary and at most a quarter of its size"
        return Draft(None, reason)
    among = f", of {len(small)} candidates" if len(small) > 1 else ""
    reason = f"the smallest GGUF of the same vocabulary beside the model{among}"
    return Draft(_smallest(small), reason)


def _smallest(fitting: Sequence[Gguf]) -> Gguf:
    return min(fitting, key=lambda one: (one.tensor_bytes, one.path.name))


def _beside(model: Gguf, cache_dir: Path, skipped: list[str]) -> Iterator[Gguf]:
    """Smaller models and draft heads; unreadable files are noted in `skipped`."""
    directory = model.path.parent
    below = (one for name in _DRAFT_DIRECTORIES for one in directory.glob(f"{name}/*.gguf"))
    for path in sorted([*directory.glob("*.gguf"), *below])[:_FILES_MAX]:
        if metadata.is_later_shard(path):
            continue
        try:
            if stat_regular(path).st_size >= model.size_bytes:
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
    if draft.drafts_for and (reason := head_misfit(draft, model)):
        return reason
    ours = vocabulary.read(model.path, cache_dir=cache_dir)
    return vocabulary.misfit(ours, vocabulary.read(draft.path, cache_dir=cache_dir))
