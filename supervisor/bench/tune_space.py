"""The variants of a model that are worth measuring, and the tuned profile that records the best.

Each variant changes one thing; the search combines helpful variants. A variant whose flags the
build lacks is left out here; a variant that does not fit or changes nothing, when it is planned.

The profile is `profiles.d/MODEL.toml`, written atomically. Replaced files stay beside it as
`MODEL.toml.1`, `.2` and so on, the newest with the highest number.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from supervisor.builds.help import Flags, FlagValue
from supervisor.errors import SettingsInvalid, access_denied
from supervisor.plan.draft import SIMPLE
from supervisor.plan.render import render
from supervisor.plan.tuned_profile import Evidence, path_of
from supervisor.settings.edit import key_text, toml
from supervisor.system.files import write_atomic
from supervisor.system.toml_file import read_toml


@dataclass(frozen=True, slots=True)
class Variant:
    """Flags that are set in addition to the profile's."""

    # The varied property, such as `threads`; variants of one axis exclude each other.
    axes: frozenset[str] = frozenset()
    # By their current names, in the order to show them.
    flags: tuple[tuple[str, FlagValue], ...] = ()
    replicas: int | None = None  # instances that serve the model; None for the model's own number
    parts: int = 1  # how many single changes it combines

    @property
    def name(self) -> str:
        words = [
            f"{key} {('on' if value else 'off') if isinstance(value, bool) else value}"
            for key, value in self.flags
        ]
        words += [f"{self.replicas} instances"] if self.replicas else []
        return ", ".join(words) or "base"


BASE = Variant()


def combine_variants(variants: Iterable[Variant]) -> Variant | None:
    """Combine the changes of some variants; None if two of them change the same thing."""
    axes: frozenset[str] = frozenset()
    flags: dict[str, FlagValue] = {}
    replicas: int | None = None
    parts = 0
    for variant in variants:
        if axes & variant.axes or flags.keys() & dict(variant.flags).keys():
            return None
        axes |= variant.axes
        flags.update(variant.flags)
        replicas = variant.replicas or replicas
        parts += variant.parts
    return Variant(axes, tuple(flags.items()), replicas, parts)


GoalName = Literal["latency", "throughput", "memory"]
_Options = Iterable[Mapping[str, FlagValue]]

_SLOTS_MAX: Final = 32
_CTX_SLOT_MIN: Final = 4096
_FEW_CORES: Final = 4
_REPLICAS: Final = (2, 4)
_EXPERT_CACHES_MIB: Final = (2048, 8192)
# Pairs of batch and micro-batch: a micro-batch is computed in one pass; a cancelled prompt still
# computes its batch.
_BATCHES: Final = ((64, 64), (128, 128), (256, 256), (512, 512), (2048, 512), (2048, 1024))
_SMALL_BATCHES: Final = ((128, 64), (64, 32), (32, 32))
# The order in which axes are tried if time is short: the largest changes come first.
_ORDER: Final[Mapping[GoalName, tuple[str, ...]]] = {
    "latency": (
        "device", "experts", "threads", "batch", "threads-batch", "flash", "cache", "poll",
        "repack", "speculation", "load",
    ),
    "throughput": (
        "device", "experts", "slots", "threads", "replicas", "cache", "flash", "batch",
        "threads-batch", "poll", "repack", "speculation", "load",
    ),
    "memory": ("slots", "cache", "repack", "context", "batch", "load", "flash", "device"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Situation:
    """The facts on which variants depend; `chosen` are the profile's flags on this machine."""

    chosen: Mapping[str, FlagValue]
    flags: Flags
    physical_cores: int
    logical_cores: int
    slots: int
    ctx_slot: int  # tokens; 0 if the engine decides
    layers: int
    experts_kept: int = 0  # layers whose experts stay in main memory, as estimated
    devices: tuple[str, ...] = ()
    draft_type: str | None = None  # `--spec-type` of its draft model or layers; None without any


def candidates(goal: GoalName, here: Situation) -> tuple[Variant, ...]:
    return tuple(variant for axis in _ORDER[goal] for variant in _axis_variants(axis, goal, here))


def _axis_variants(axis: str, goal: GoalName, here: Situation) -> Iterator[Variant]:
    if axis == "replicas":
        yield from _replicas(here)
        return
    for options in _AXES[axis](goal, here):
        flags = tuple(options.items())
        if any(here.chosen.get(key) != value for key, value in options.items()) and _is_supported(
            options, here.flags
        ):
            yield Variant(frozenset({axis}), flags)


def _is_supported(options: Mapping[str, FlagValue], flags: Flags) -> bool:
    try:
        return not render(options, flags)[1]
    except SettingsInvalid:
        return False


def _thread_counts(here: Situation) -> list[int]:
    cores = here.physical_cores
    few = {1} if cores <= _FEW_CORES else set[int]()
    counts = {cores, cores - 1, cores // 2, cores * 3 // 4, here.logical_cores} | few
    return sorted((count for count in counts if 1 <= count <= here.logical_cores), reverse=True)


def _batch(goal: GoalName, _here: Situation) -> _Options:
    for batch, ubatch in _SMALL_BATCHES if goal == "memory" else reversed(_BATCHES):
        yield {"batch-size": batch, "ubatch-size": ubatch}


def _cache(goal: GoalName, _here: Situation) -> _Options:
    kinds = ("q8_0", "q4_0") if goal == "memory" else ("q8_0", "f16", "bf16")
    for kind in kinds:
        yield {"cache-type-k": kind, "cache-type-v": kind}


def _speculation(_goal: GoalName, here: Situation) -> _Options:
    if here.chosen.get("spec-type", "none") != "none":
        yield {"spec-type": "none"}
    if here.draft_type:
        # Draft heads predict few tokens well.
        for length in (3, 8, 16) if here.draft_type == SIMPLE else (2, 4, 8):
            yield {"spec-type": here.draft_type, "spec-draft-n-max": length}
    yield {"spec-type": "ngram-mod"}
    yield {
        "spec-type": "ngram-simple",
        "spec-ngram-simple-size-n": 4,
        "spec-ngram-simple-size-m": 8,
    }


def _slots(goal: GoalName, here: Situation) -> _Options:
    """Yield other numbers of slots, each with today's context per slot."""
    if goal == "memory":
        counts = [count for count in (1, 2) if count < here.slots]
    else:
        doubled = (here.slots * factor for factor in (2, 4, 8))
        counts = [count for count in doubled if count <= _SLOTS_MAX]
    for count in counts:
        yield {"parallel": count} | _context_of(here.ctx_slot * count)
    if goal == "memory" and here.slots > 1 and here.ctx_slot // 2 >= _CTX_SLOT_MIN:
        yield {"parallel": 1} | _context_of(here.ctx_slot // 2)


def _context_of(tokens: int) -> dict[str, FlagValue]:
    return {"ctx-size": tokens} if tokens else {}


def _device(_goal: GoalName, here: Situation) -> _Options:
    if not here.devices:
        return
    for layers in (0, here.layers // 2, 999):
        yield {"gpu-layers": layers}
    if len(here.devices) > 1:
        for name in here.devices:
            yield {"device": name}


def _experts(_goal: GoalName, here: Situation) -> _Options:
    """Yield placements of experts, if not all fit on devices: as estimated, and with more room.

    Builds with a cache on the device for experts in main memory are tried with two cache sizes.
    """
    kept = here.experts_kept
    if not (here.devices and kept):
        return
    for layers in dict.fromkeys((kept, min(here.layers, kept + here.layers // 8), here.layers)):
        yield {"gpu-layers": 999, "n-cpu-moe": layers}
    for size_mib in _EXPERT_CACHES_MIB:
        yield {"gpu-layers": 999, "n-cpu-moe": here.layers, "moe-cache-mib": size_mib}


def _replicas(here: Situation) -> Iterator[Variant]:
    """Yield more instances with as many slots in all, each with its share of the cores."""
    for count in _REPLICAS:
        threads, slots = here.physical_cores // count, here.slots // count
        if threads and slots and not here.devices:
            flags: dict[str, FlagValue] = {"threads": threads, "threads-batch": threads}
            flags |= {"parallel": slots} | _context_of(here.ctx_slot * slots)
            axes = frozenset({"replicas", "threads", "threads-batch", "slots"})
            yield Variant(axes, tuple(flags.items()), count)


def _flash(_goal: GoalName, here: Situation) -> _Options:
    yield {"flash-attn": "off" if here.chosen.get("flash-attn", "on") != "off" else "on"}


_AXES: Final[Mapping[str, Callable[[GoalName, Situation], _Options]]] = {
    "batch": _batch,
    "cache": _cache,
    "context": lambda _, here: (
        [{"ctx-size": here.ctx_slot // 2 * here.slots}]
        if here.ctx_slot // 2 >= _CTX_SLOT_MIN
        else []
    ),
    "device": _device,
    "experts": _experts,
    "flash": _flash,
    "load": lambda _goal, _here: ({"load-mode": mode} for mode in ("mmap", "none")),
    "poll": lambda _goal, _here: ({"poll": level} for level in (0, 100)),
    "repack": lambda _, here: [{"repack": here.chosen.get("repack") is False}],
    "slots": _slots,
    "speculation": _speculation,
    "threads": lambda _, here: ({"threads": count} for count in _thread_counts(here)),
    "threads-batch": lambda _, here: ({"threads-batch": count} for count in _thread_counts(here)),
}


def render_profile(
    model: str,
    profile: str,
    variant: Variant,
    evidence: Evidence,
    command: str,
    facts: Sequence[tuple[str, str]],
) -> str:
    """Return the file's text, in which no value can end a comment or a string.

    `facts` are the measurements, by name.
    """
    goal, flags = evidence.goal, key_text(("models", model, "flags"))
    lines = [
        *_comments(
            f"Written by: {command}",
            f"It extends the profile {profile}; [{flags}] overrides it.",
            f"corral tune {model} --undo removes it.",
            "",
            *(f"{name}: {value}" for name, value in facts),
        ),
        "",
        f"description = {_literal(f'{model} on this machine, tuned for {goal}')}",
        f"extends = {_literal(profile)}",
        *([f"replicas = {variant.replicas}"] if variant.replicas else []),
        "",
        "[flags]",
        *(f"{key} = {_literal(value)}" for key, value in variant.flags),
        "",
        "[tuned]",
        *(f"{key} = {_literal(getattr(evidence, key))}" for key in Evidence.__slots__),
    ]
    return "\n".join(lines) + "\n"


def _literal(value: FlagValue) -> str:
    # TOML has no surrogates.
    return toml(value.encode(errors="replace").decode() if isinstance(value, str) else value)


def _comments(*paragraphs: str) -> Iterable[str]:
    return [
        f"# {''.join(char if char.isprintable() else '?' for char in text)}".rstrip()
        for text in paragraphs
    ]


_BACKUPS_MAX: Final = 10
_NUMBER: Final = re.compile(r"\d{1,6}")


def write(
    model: str, directory: Path, text: str, *, backs_up: bool = True
) -> tuple[Path, Path | None]:
    """Write a profile and return its path and its backup's, or change nothing: AccessDenied."""
    path = path_of(model, directory)
    with access_denied(f"cannot write {path}"):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        backup = _back_up(path) if backs_up else None
        write_atomic(path, text)
    return path, backup


def withdraw(model: str, directory: Path) -> Path | None:
    """Remove a profile; return its backup's path, None if it is gone, or raise AccessDenied."""
    path = path_of(model, directory)
    with access_denied(f"cannot remove {path}"):
        backup = _back_up(path)
        path.unlink(missing_ok=True)
    return backup


def undo(model: str, directory: Path) -> tuple[Path, Path | None]:
    """Restore the previous profile, or remove the newest; return its path and the backup.

    Raises SettingsInvalid if `corral tune` wrote none, or AccessDenied; nothing is changed then.
    """
    path = path_of(model, directory)
    backups = _backups(path)
    with access_denied(f"cannot change {path}"):
        if backups:
            backups[-1].replace(path)
            return path, backups[-1]
        _check_ours(model, path)
        path.unlink()
    return path, None


def _check_ours(model: str, path: Path) -> None:
    if not os.path.lexists(path):
        raise SettingsInvalid(
            f"there is nothing to undo: {model} has no tuned profile",
            hint=f"corral tune {model} makes one",
        )
    try:
        is_ours = "tuned" in read_toml(path)
    except SettingsInvalid:
        is_ours = True  # a broken file sets no flags
    if not is_ours:
        raise SettingsInvalid(
            f"{path} was not written by corral tune: it has no table [tuned]",
            hint=f"remove it by hand: rm {path}",
        )


def _back_up(path: Path) -> Path | None:
    """Link the present file to the next free number, and delete the oldest backups."""
    if not os.path.lexists(path):
        return None
    backups = _backups(path)
    number = int(backups[-1].suffix[1:]) + 1 if backups else 1
    backup = path.with_name(f"{path.name}.{number}")
    os.link(path, backup, follow_symlinks=False)
    for old in backups[: max(0, len(backups) + 1 - _BACKUPS_MAX)]:
        old.unlink(missing_ok=True)
    return backup


def _backups(path: Path) -> list[Path]:
    found = [backup for backup in path.parent.glob("*") if backup.stem == path.name]
    numbered = [backup for backup in found if _NUMBER.fullmatch(backup.suffix[1:])]
    return sorted(numbered, key=lambda backup: int(backup.suffix[1:]))
