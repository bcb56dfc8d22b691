"""The variants worth a measurement, of one model on one machine and build. Pure.

Each changes one thing; the search combines those that help. What the build has no flag for is left
out here; what does not fit or changes nothing is left out when the variant is planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from supervisor.engines.help import Flags, FlagValue
from supervisor.errors import SettingsInvalid
from supervisor.flags.draft_heads import SIMPLE
from supervisor.flags.render import render
from supervisor.tune.variant import Variant

GoalName = Literal["latency", "throughput", "memory"]
_Options = Iterator[Mapping[str, FlagValue]]

_SLOTS_MAX: Final = 32
_CTX_SLOT_MIN: Final = 4096
_FEW_CORES: Final = 4
_REPLICAS: Final = (2, 4)
# Pairs of batch and micro-batch: a micro-batch is computed at once, a batch is what a cancelled
# prompt still computes.
_BATCHES: Final = ((64, 64), (128, 128), (256, 256), (512, 512), (2048, 512), (2048, 1024))
_SMALL_BATCHES: Final = ((128, 64), (64, 32), (32, 32))
# The order in which axes are tried where time is short: what changes most stands first.
_ORDER: Final[Mapping[GoalName, tuple[str, ...]]] = {
    "latency": (
        "device", "threads", "batch", "threads-batch", "flash", "cache", "poll", "repack",
        "speculation", "load",
    ),
    "throughput": (
        "device", "slots", "threads", "replicas", "cache", "flash", "batch", "threads-batch",
        "poll", "repack", "speculation", "load",
    ),
    "memory": ("slots", "cache", "repack", "context", "batch", "load", "flash", "device"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Situation:
    """What the variants depend on; `chosen` is how the profile runs the model here."""

    chosen: Mapping[str, FlagValue]
    flags: Flags
    physical_cores: int
    logical_cores: int
    slots: int
    ctx_slot: int  # tokens; 0 if the engine decides
    layers: int
    devices: tuple[str, ...] = ()
    draft_type: str | None = None  # `--spec-type` of its draft model or layers; None without any


def candidates(goal: GoalName, here: Situation) -> tuple[Variant, ...]:
    """The variants to try for a goal, those that promise most first."""
    return tuple(variant for axis in _ORDER[goal] for variant in _of_axis(axis, goal, here))


def _of_axis(axis: str, goal: GoalName, here: Situation) -> Iterator[Variant]:
    if axis == "replicas":
        yield from _replicas(here)
        return
    for options in _AXES[axis](goal, here):
        flags = tuple(options.items())
        if _differs(options, here.chosen) and _is_supported(options, here.flags):
            yield Variant(frozenset({axis}), flags)


def _differs(options: Mapping[str, FlagValue], chosen: Mapping[str, FlagValue]) -> bool:
    return any(chosen.get(key) != value for key, value in options.items())


def _is_supported(options: Mapping[str, FlagValue], flags: Flags) -> bool:
    try:
        return not render(options, flags).omitted
    except SettingsInvalid:
        return False


def _threads(_goal: GoalName, here: Situation) -> _Options:
    for count in _thread_counts(here):
        yield {"threads": count}


def _threads_batch(_goal: GoalName, here: Situation) -> _Options:
    for count in _thread_counts(here):
        yield {"threads-batch": count}


def _thread_counts(here: Situation) -> list[int]:
    cores = here.physical_cores
    few = {1} if cores <= _FEW_CORES else set[int]()
    counts = {cores, cores - 1, cores // 2, cores * 3 // 4, here.logical_cores} | few
    return sorted((one for one in counts if 1 <= one <= here.logical_cores), reverse=True)


def _poll(_goal: GoalName, _here: Situation) -> _Options:
    for level in (0, 100):
        yield {"poll": level}


def _batch(goal: GoalName, _here: Situation) -> _Options:
    for batch, ubatch in _SMALL_BATCHES if goal == "memory" else reversed(_BATCHES):
        yield {"batch-size": batch, "ubatch-size": ubatch}


def _cache(goal: GoalName, _here: Situation) -> _Options:
    kinds = ("q8_0", "q4_0") if goal == "memory" else ("q8_0", "f16", "bf16")
    for kind in kinds:
        yield {"cache-type-k": kind, "cache-type-v": kind}


def _flash(_goal: GoalName, here: Situation) -> _Options:
    yield {"flash-attn": "off" if here.chosen.get("flash-attn", "on") != "off" else "on"}


def _repack(_goal: GoalName, here: Situation) -> _Options:
    yield {"repack": here.chosen.get("repack") is False}


def _load(_goal: GoalName, _here: Situation) -> _Options:
    for mode in ("mmap", "none"):
        yield {"load-mode": mode}


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
    """Other numbers of slots, each with the context of today."""
    if goal == "memory":
        counts = [count for count in (1, 2) if count < here.slots]
    else:
        doubled = (here.slots * factor for factor in (2, 4, 8))
        counts = [count for count in doubled if count <= _SLOTS_MAX]
    for count in counts:
        yield {"parallel": count} | _context_of(here.ctx_slot * count)
    if goal == "memory" and here.slots > 1 and here.ctx_slot // 2 >= _CTX_SLOT_MIN:
        yield {"parallel": 1} | _context_of(here.ctx_slot // 2)


def _context(_goal: GoalName, here: Situation) -> _Options:
    if here.ctx_slot // 2 >= _CTX_SLOT_MIN:
        yield {"ctx-size": here.ctx_slot // 2 * here.slots}


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


def _replicas(here: Situation) -> Iterator[Variant]:
    """More instances with as many slots in all, each with its share of the cores."""
    for count in _REPLICAS:
        threads, slots = here.physical_cores // count, here.slots // count
        if threads and slots and not here.devices:
            flags: dict[str, FlagValue] = {"threads": threads, "threads-batch": threads}
            flags |= {"parallel": slots} | _context_of(here.ctx_slot * slots)
            axes = frozenset({"replicas", "threads", "threads-batch", "slots"})
            yield Variant(axes, tuple(flags.items()), count)


_AXES: Final = {
    "batch": _batch,
    "cache": _cache,
    "context": _context,
    "device": _device,
    "flash": _flash,
    "load": _load,
    "poll": _poll,
    "repack": _repack,
    "slots": _slots,
    "speculation": _speculation,
    "threads": _threads,
    "threads-batch": _threads_batch,
}
