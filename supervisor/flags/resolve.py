"""Merges a model's settings from all sources and derives every `auto`. Pure.

A model's own flags, and its `batching`, win over its profile, and its profile over llama-corral's
defaults. Of one option, flags win over `batching`: only a trial sets both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

from supervisor.engines.discover import Device
from supervisor.engines.help import Flags, FlagValue
from supervisor.engines.installed import EngineSetting
from supervisor.engines.spec_types import draft_limits
from supervisor.flags.adapted_slots import CONTEXT, SLOTS, adapt_slots
from supervisor.flags.auto import (
    AUTO,
    AUTO_VALUES,
    PlanInputs,
    cache_count,
    ctx_slot,
    positive,
    slots,
)
from supervisor.flags.batching import BatchingSettings
from supervisor.flags.draft_heads import SIMPLE, draft_type
from supervisor.flags.draft_model import Draft, DraftSetting
from supervisor.flags.embedding_settings import embedding_batches, embedding_slots, explicit_purpose
from supervisor.flags.loras import Lora, lora_settings
from supervisor.flags.profile import Profile
from supervisor.flags.projector import FLAG as MMPROJ
from supervisor.flags.render import canonical
from supervisor.flags.setting import CORRAL, Setting, Settings, values
from supervisor.flags.workers import RPC, RpcWorker, fitting_split, rpc_settings

# Defaults for every engine, with reasons. Profiles and models override them; a build without the
# option does not get it.
CORRAL_DEFAULTS: Final[Mapping[str, tuple[FlagValue, str]]] = MappingProxyType(
    {
        "metrics": (True, "status and health checks read its counters"),
        "slots": (True, "status shows its slots"),
        "ui": (False, "engines serve the proxy, not browsers"),
        "cors-origins": ("localhost", "no foreign web page may send requests to an engine"),
        "offline": (True, "engines download nothing"),
        "jinja": (True, "tool calls need the model's own template"),
        "log-colors": ("off", "the log goes to a file"),
        # An engine with an open stream notices SIGTERM at its next ping; at the default of 30 s it
        # hangs for as long. During a long prefill pings also show that it works.
        "sse-ping-interval": (1, "an engine notices SIGTERM at its next ping"),
    }
)


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model of `corral.toml`."""

    name: str
    path: Path
    profile: str = "base"
    replicas: int | Literal["auto"] = 1
    flags: Mapping[str, FlagValue] = field(default_factory=dict)
    args: tuple[str, ...] = ()  # words for the end of the command line, passed on unchecked
    draft: DraftSetting = None  # a GGUF to draft with, `auto` to look for one, or None
    aliases: tuple[str, ...] = ()
    batching: BatchingSettings = field(default_factory=BatchingSettings)
    engine: EngineSetting | None = None  # its own; None: the one of all models
    projector: Path | None = None  # found beside it; None where its settings decide
    loras: tuple[Lora, ...] = ()  # that requests choose by name
    workers: tuple[RpcWorker, ...] = ()  # those that compute its layers now
    serves_ui: bool = False  # whether browsers get the engine's own web UI
    split: str | None = None  # the `--tensor-split` to which its layers were moved
    # What replaces all of the above after its engine ran out of memory.
    reduced: Settings = field(default_factory=dict)


def resolve(
    entry: ModelEntry,
    profile: Profile,
    flags: Flags,
    inputs: PlanInputs,
    draft: Draft,
    devices: tuple[Device, ...] = (),
) -> Settings:
    """All settings of a model by today's name, with nothing left to derive.

    `devices` are those of this machine.
    """
    gguf = inputs.gguf
    planned = _with_workers(_merge(entry, profile, flags, draft), entry, flags, devices)
    found = {**planned, **entry.reduced}
    merged = explicit_purpose(found, entry.args, entry.name, gguf)
    derived = _cap_context(_derived(embedding_slots(merged, gguf), inputs), inputs)
    return _raise_batch(embedding_batches(derived, gguf))


def is_auto(key: str, value: FlagValue) -> bool:
    """Whether we derive this value; other options have an `auto` of their own."""
    return key in AUTO_VALUES and value == AUTO


def _merge(entry: ModelEntry, profile: Profile, flags: Flags, draft: Draft) -> Settings:
    """All settings in today's vocabulary; the last source wins."""
    ours = {key: Setting(value, CORRAL, reason) for key, (value, reason) in CORRAL_DEFAULTS.items()}
    if entry.serves_ui:
        ours["ui"] = Setting(value=True, origin=CORRAL, reason="engine_ui under [proxy]")
    named = _canonical(profile.flags, flags, lambda name: f"profile {profile.origins[name]}")
    given = _canonical(entry.flags, flags, lambda _: f"model {entry.name}")
    own = {**entry.batching.settings(), **given}
    if draft.gguf:
        path = str(draft.gguf.path)
        origin = f"model {entry.name}" if entry.draft else CORRAL
        own["spec-draft-model"] = Setting(path, origin, draft.reason)
    if entry.projector:
        own[MMPROJ] = Setting(str(entry.projector), CORRAL, "the projector beside the model")
    settings = {**ours, **named, **own, **lora_settings(entry.loras)}
    if "spec-draft-model" in settings:
        reason = "a draft model alone does not enable drafting"
        kind = draft_type(draft.gguf) if draft.gguf else SIMPLE
        return {
            **settings,
            "spec-type": settings.get("spec-type", Setting(kind, CORRAL, reason)),
        }
    # A profile may have numbers for drafting, which are useless without a draft model.
    return {k: v for k, v in settings.items() if k in own or not k.startswith("spec-draft-")}


def _with_workers(
    merged: Settings, entry: ModelEntry, flags: Flags, devices: tuple[Device, ...]
) -> Settings:
    """With the options of workers, `--rpc` first: `--device` may name what it adds."""
    if not entry.workers:
        return merged
    own = {key: one for key, one in merged.items() if one.is_own}
    remote = rpc_settings(entry.workers, own, flags, devices, entry.split)
    kept = fitting_split(own, entry.workers)
    rest = {key: one for key, one in merged.items() if key in kept or not one.is_own}
    return {RPC: remote[RPC], **rest, **remote, **kept}


def _canonical(
    given: Mapping[str, FlagValue], flags: Flags, origin: Callable[[str], str]
) -> dict[str, Setting]:
    found = ((name, canonical(name, value, flags)) for name, value in given.items())
    return {key: Setting(value, origin(name)) for name, (key, value) in found}


def _derived(settings: Settings, inputs: PlanInputs) -> Settings:
    chosen = {k: v.value for k, v in settings.items() if not is_auto(k, v.value)}
    found: dict[str, Setting] = {}
    for key, decide in AUTO_VALUES.items():
        if key in settings and key not in chosen:
            adapted = inputs.adapted.get(key) if key != SLOTS else None
            found[key] = adapted or decide(inputs, chosen)
            chosen[key] = found[key].value
    if {SLOTS, CONTEXT} <= found.keys() and SLOTS in inputs.adapted:
        found |= adapt_slots({**settings, **found}, inputs)
    derived = {key: replace(one, is_derived=True) for key, one in found.items()}
    return {**settings, **derived}


def _cap_context(settings: Settings, inputs: PlanInputs) -> Settings:
    """Limit a profile's context to the length the model was trained for."""
    ctx, trained = settings.get("ctx-size"), inputs.gguf.ctx_train
    chosen = values(settings)
    if (
        not ctx
        or not ctx.origin.startswith("profile")
        or ctx_slot(chosen) <= trained
        or not trained
    ):
        return settings
    reason = (
        f"{trained} tokens per slot, the model's training context; {ctx.origin} has {ctx.value}"
    )
    return {**settings, "ctx-size": Setting(trained * cache_count(chosen), "gguf", reason)}


def _raise_batch(settings: Settings) -> Settings:
    """Raise the batch size to hold what all slots draft at once.

    An engine with a smaller batch aborts on an assertion in the middle of responses.

    Source: measured on build 10434: 2 slots and ngram-mod abort with 128, not with 130. llama.cpp,
    tools/server, server_slot::handle_last_sampled_token.
    """
    batch = settings.get("batch-size")
    chosen = values(settings)
    drafted = [positive(key, chosen.get(key, default)) for key, default in draft_limits(chosen)]
    needed = slots(chosen) * (1 + max(drafted, default=0))
    if batch is None or not drafted or positive("batch-size", batch.value) >= needed:
        return settings
    reason = f"{batch.value} ({batch.origin}) is less than {slots(chosen)} slots draft at once"
    return {**settings, "batch-size": Setting(needed, CORRAL, reason)}
