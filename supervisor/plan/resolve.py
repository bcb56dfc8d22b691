"""Merges a model's settings from all sources and derives every `auto`. Pure.

A model's own `flags` and `batching` override its profile, and the profile overrides llama-corral's
defaults. If both set an option, which only a trial can do, `flags` override `batching`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

from pydantic import Field

from proxy.common.toml_types import SettingsTable
from supervisor.builds.discover import Device
from supervisor.builds.help import (
    Flags,
    FlagValue,
    draft_limits,
    has_draft_cache,
    newest_flags,
)
from supervisor.builds.installed import EngineSetting
from supervisor.errors import SettingsInvalid
from supervisor.plan import auto
from supervisor.plan.draft import DSPARK, SIMPLE, Draft, DraftSetting, draft_type
from supervisor.plan.draft_speed import NONE, SPEC_TYPE
from supervisor.plan.embedding import FLAG as MMPROJ
from supervisor.plan.embedding import embedding_batches, embedding_slots, explicit_purpose
from supervisor.plan.loras import LoraSettings, lora_settings
from supervisor.plan.profile import Profile
from supervisor.plan.render import canonical, errors_of
from supervisor.plan.setting import BATCHING, CORRAL, DEFAULTS, Setting, SettingsByFlag, values

# The option that each key sets, by its name in `[models.NAME.flags]`.
OPTIONS: Final[Mapping[str, str]] = {
    "max_ubatch_tokens": "ubatch-size",
    "max_sbatch_sequences": "parallel",
    "max_context_length": "ctx-size",
    "dynamic_batching": "cont-batching",
}


class BatchingSettings(SettingsTable):
    """`[models.NAME.batching]`: continuous batching; unset keys follow the profile."""

    max_ubatch_tokens: int | None = Field(None, ge=1, le=65_536)
    """most tokens of one forward pass (--ubatch-size)"""
    max_sbatch_sequences: int | None = Field(None, ge=1, le=1024)
    """sequences of one batch: the slots of an instance (--parallel), which then do not follow
    demand"""
    max_context_length: int | None = Field(None, ge=1, le=2**24)
    """tokens of context of one sequence; --ctx-size is this for each slot"""
    dynamic_batching: bool | None = None
    """whether a sequence may join while others decode (--cont-batching)"""
    prefer_pure_decode: bool = False
    """prefer short pauses of running streams to a short time to the first token: prompts are
    computed one at a time and in chunks while others decode"""

    def settings(self) -> dict[str, Setting]:
        """Return settings by today's option names; `auto` if other settings decide the number."""
        given = {
            option: Setting(value, BATCHING, key)
            for key, option in OPTIONS.items()
            if (value := getattr(self, key)) is not None
        }
        if self.max_context_length is not None:
            given["ctx-size"] = Setting(auto.AUTO, BATCHING)
        return given

    def conflicts(self, flags: Mapping[str, FlagValue]) -> Iterator[tuple[str, str]]:
        """Yield each key whose option a flag of the model sets too, with that flag."""
        keys = {OPTIONS[key]: key for key in OPTIONS if getattr(self, key) is not None}
        for name, value in flags.items() if keys else ():
            try:
                option, _ = canonical(name, value, newest_flags())
            except SettingsInvalid:  # its plan reports it
                continue
            if key := keys.get(option):
                yield key, name


RPC: Final = "rpc"
SPLIT: Final = "tensor-split"


@dataclass(frozen=True, slots=True)
class RpcWorker:
    name: str
    address: str  # HOST:PORT
    devices: tuple[Device, ...]  # reported by the worker, or assumed


def devices_of(workers: Sequence[RpcWorker]) -> tuple[Device, ...]:
    """Return the devices of all workers under the engine's names for them.

    These are RPC0, RPC1 … in the order of `--rpc`, before the devices of this machine. Source:
    llama.cpp, ggml-rpc.cpp, ggml_backend_rpc_add_server.
    """
    found = [replace(device, worker=worker.name) for worker in workers for device in worker.devices]
    return tuple(replace(device, name=f"RPC{number}") for number, device in enumerate(found))


def rpc_settings(
    workers: Sequence[RpcWorker],
    own: SettingsByFlag,
    flags: Flags,
    local: Sequence[Device],
    split: str | None = None,
) -> SettingsByFlag:
    """Return the settings that put all layers on workers, with `--rpc` first.

    `split` is the `--tensor-split` to which layers were moved, or None. Raises SettingsInvalid: the
    build has no RPC, or the model sets `rpc` itself.
    """
    if not flags.find(RPC):
        raise SettingsInvalid(
            "the engine was built without RPC, so workers cannot compute layers for it",
            hint="use a build with -DGGML_RPC=ON (`corral engine list`)",
        )
    if RPC in own:
        raise SettingsInvalid("rpc is set beside workers", hint="use one of the two")
    origin = f"workers {', '.join(worker.name for worker in workers)}"
    devices = devices_of(workers)
    sizes = [device.total_mib for device in devices]
    if split:
        shares = Setting(split, "corral balance", "by the time of each worker")
    elif len(set(sizes)) == 1:
        shares = Setting(
            ",".join("1" for _ in sizes), origin, "equal: they have as much memory each"
        )
    else:
        shares = Setting(",".join(map(str, sizes)), origin, "by their memory in MiB")
    found = {
        RPC: Setting(",".join(worker.address for worker in workers), origin),
        "gpu-layers": Setting("all", origin, "every layer goes to a worker"),
        SPLIT: shares,
        "fit": Setting("off", origin, "the split is fixed"),
    }
    if local:
        names = ",".join(device.name for device in devices)
        found["device"] = Setting(names, origin, "layers go to workers only")
    return found


def fitting_split(own: SettingsByFlag, workers: Sequence[RpcWorker]) -> SettingsByFlag:
    """Remove a split for another number of devices from the model's own settings."""
    split = own.get(SPLIT)
    if split is None or len(str(split.value).split(",")) == len(devices_of(workers)):
        return own
    return {key: setting for key, setting in own.items() if key != SPLIT}


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model of `corral.toml`."""

    name: str
    path: Path
    profile: str = "base"
    replicas: int | Literal["auto"] = 1
    flags: Mapping[str, FlagValue] = field(default_factory=dict)
    args: tuple[str, ...] = ()  # words for the end of the command line, passed on unchecked
    draft: DraftSetting = None  # a GGUF to draft with, `auto` to search for one, or None
    aliases: tuple[str, ...] = ()
    batching: BatchingSettings = field(default_factory=BatchingSettings)
    engine: EngineSetting | None = None  # its own engine; None for the engine of all models
    projector: Path | None = None  # found beside it; None if its settings decide
    loras: Mapping[str, LoraSettings] = field(default_factory=dict)  # by the name in requests
    workers: tuple[RpcWorker, ...] = ()  # workers that compute its layers now
    serves_ui: bool = False  # whether browsers get the engine's own web UI
    runs_tools: bool = False  # whether its own flags may have the engine run tools
    split: str | None = None  # the `--tensor-split` to which its layers were moved
    # Settings that override all others after its engine ran out of memory.
    reduced: SettingsByFlag = field(default_factory=dict)


def resolve(
    entry: ModelEntry,
    profile: Profile,
    flags: Flags,
    inputs: auto.PlanInputs,
    draft: Draft,
    devices: tuple[Device, ...] = (),
) -> SettingsByFlag:
    """Return a model's settings by today's names for these `devices`, every `auto` derived."""
    gguf = inputs.gguf
    planned = _with_workers(_merge(entry, profile, flags, draft), entry, flags, devices)
    if _drafts_no_more(planned, inputs.adapted):
        planned = {k: v for k, v in planned.items() if not k.startswith("spec-draft-")}
    merged = explicit_purpose({**planned, **entry.reduced}, entry.args, entry.name, gguf)
    derived = _cap_context(_derive_settings(embedding_slots(merged, gguf), inputs), inputs)
    return _sleep_at_once(_raise_batch(embedding_batches(derived, gguf)))


def is_auto(key: str, value: FlagValue) -> bool:
    """Return whether we derive this value; for other options, `auto` is the engine's."""
    return key in auto.AUTO_VALUES and value == auto.AUTO


def _merge(entry: ModelEntry, profile: Profile, flags: Flags, draft: Draft) -> SettingsByFlag:
    """Merge all sources by today's names; the last source wins."""
    ours = {key: Setting(value, CORRAL, reason) for key, (value, reason) in DEFAULTS.items()}
    if entry.serves_ui:
        ours["ui"] = Setting(value=True, origin=CORRAL, reason="engine_ui under [proxy]")
    named = _canonical(profile.flags, flags, lambda name: f"profile {profile.origins[name]}")
    given = _canonical(
        entry.flags, flags, lambda _: f"model {entry.name}", runs_tools=entry.runs_tools
    )
    own = {**entry.batching.settings(), **given}
    if draft.gguf:
        path = str(draft.gguf.path)
        origin = f"model {entry.name}" if entry.draft else CORRAL
        own["spec-draft-model"] = Setting(path, origin, draft.reason)
        if draft_type(draft.gguf) == DSPARK and not draft.gguf.has_confidence_head:
            reason = "its DSpark heads cannot tell how sure they are"
            own.setdefault("spec-draft-p-min", Setting(0, CORRAL, reason))
    if entry.projector:
        own[MMPROJ] = Setting(str(entry.projector), CORRAL, "the projector beside the model")
    settings = {**ours, **named, **own, **lora_settings(entry.loras)}
    if "spec-draft-model" in settings:
        reason = "a draft model alone does not enable drafting"
        kind = SIMPLE if "spec-draft-model" in given else auto.AUTO
        return {**settings, "spec-type": settings.get("spec-type", Setting(kind, CORRAL, reason))}
    # A profile may have numbers for drafting, which are useless without a draft model.
    return {k: v for k, v in settings.items() if k in own or not k.startswith("spec-draft-")}


def _drafts_no_more(planned: SettingsByFlag, adapted: SettingsByFlag) -> bool:
    """Return whether drafting is off by speed: then a draft model would only take memory."""
    setting, to = planned.get(SPEC_TYPE), adapted.get(SPEC_TYPE)
    return bool(setting and to and is_auto(SPEC_TYPE, setting.value) and to.value == NONE)


def _with_workers(
    merged: SettingsByFlag, entry: ModelEntry, flags: Flags, devices: tuple[Device, ...]
) -> SettingsByFlag:
    """Add the options of workers, `--rpc` first because `--device` may name its devices."""
    if not entry.workers:
        return merged
    own = {key: setting for key, setting in merged.items() if setting.is_own}
    remote = rpc_settings(entry.workers, own, flags, devices, entry.split)
    kept = fitting_split(own, entry.workers)
    rest = {key: setting for key, setting in merged.items() if key in kept or not setting.is_own}
    return {RPC: remote[RPC], **rest, **remote, **kept}


def _canonical(
    given: Mapping[str, FlagValue],
    flags: Flags,
    origin: Callable[[str], str],
    *,
    runs_tools: bool = False,
) -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for name, given_value in given.items():
        with errors_of(origin(name)):
            key, value = canonical(name, given_value, flags, runs_tools=runs_tools)
        found[key] = Setting(value, origin(name))
    return found


def _derive_settings(settings: SettingsByFlag, inputs: auto.PlanInputs) -> SettingsByFlag:
    chosen = {k: v.value for k, v in settings.items() if not is_auto(k, v.value)}
    found: dict[str, Setting] = {}
    for key, decide in auto.AUTO_VALUES.items():
        if key in settings and key not in chosen:
            adapted = inputs.adapted.get(key) if key != auto.SLOTS else None
            found[key] = adapted or decide(inputs, chosen)
            chosen[key] = found[key].value
    if {auto.SLOTS, auto.CONTEXT} <= found.keys() and auto.SLOTS in inputs.adapted:
        found |= auto.adapt_slots({**settings, **found}, inputs)
    derived = {key: replace(setting, is_derived=True) for key, setting in found.items()}
    return {**settings, **derived}


def _cap_context(settings: SettingsByFlag, inputs: auto.PlanInputs) -> SettingsByFlag:
    ctx, trained = settings.get("ctx-size"), inputs.gguf.ctx_train
    chosen = values(settings)
    if (
        not (ctx and trained and ctx.origin.startswith("profile"))
        or auto.ctx_slot(chosen) <= trained
    ):
        return settings
    reason = f"{trained} tokens per slot, the model's training context; "
    reason += f"{ctx.origin} has {ctx.value}"
    return {**settings, "ctx-size": Setting(trained * auto.cache_count(chosen), "gguf", reason)}


def _sleep_at_once(settings: SettingsByFlag) -> SettingsByFlag:
    """Make idle threads sleep if another model drafts: both models take turns on the same cores.

    Threads of one model poll for work for some 0.1 s by default, while the other one computes.
    Engines that are built with OpenMP ignore this.

    Source: measured on build 10434, 2 cores and threads, 135M model: 7 tokens/s and 27 with `--poll
    0`, when 2 % of the drafts were accepted; 15 and 36, when two thirds were. llama.cpp,
    ggml-cpu.c, ggml_graph_compute_poll_for_work.
    """
    if "poll" in settings or not has_draft_cache(values(settings)):
        return settings
    reason = "idle threads of one model leave the cores to the other"
    return {**settings, "poll": Setting(0, CORRAL, reason)}


def _raise_batch(settings: SettingsByFlag) -> SettingsByFlag:
    """Raise the batch size so that it holds the tokens that all slots draft at once.

    An engine with a smaller batch aborts on an assertion in the middle of responses.

    Source: measured on build 10434: 2 slots and ngram-mod abort with 128, not with 130. llama.cpp,
    tools/server, server_slot::handle_last_sampled_token.
    """
    batch = settings.get("batch-size")
    chosen = values(settings)
    drafted = [
        auto.positive(key, chosen.get(key, default)) for key, default in draft_limits(chosen)
    ]
    needed = auto.slots(chosen) * (1 + max(drafted, default=0))
    if batch is None or not drafted or auto.positive("batch-size", batch.value) >= needed:
        return settings
    reason = f"{batch.value} ({batch.origin}) is less than {auto.slots(chosen)} slots draft at once"
    return {**settings, "batch-size": Setting(needed, CORRAL, reason)}
