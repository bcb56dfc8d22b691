"""Plans the command line of a model or of its trial, with the origin of each word. Pure.

Settings are merged and every `auto` is derived (resolve.py, auto.py), settings that cannot work on
this machine are omitted, and the rest is rendered for the installed build (render.py). With the
omitted settings an engine would only log a warning (`--mlock` and `--prio` without permission) or
not start at all (a quantised V cache without flash attention).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final, Self

from pydantic import Field, model_validator

from proxy.common.toml_types import SettingsTable, Text
from supervisor.builds.discover import Engine
from supervisor.builds.help import Flags, FlagValue
from supervisor.builds.installed import EngineField
from supervisor.models.metadata import Gguf
from supervisor.plan import kv_cache
from supervisor.plan.auto import PlanInputs, ThreadSpeeds, cache_count, ctx_slot, slots
from supervisor.plan.context import Chosen, Embedding, context_layout, embedding
from supervisor.plan.draft import Draft, offered_types
from supervisor.plan.estimate import Estimate, MemoryInputs, estimate, repacked_bytes
from supervisor.plan.loras import SCALED
from supervisor.plan.profile import Profile
from supervisor.plan.render import OmittedFlag, RenderedFlag, canonical, errors_of, render
from supervisor.plan.resolve import (
    RPC,
    ModelEntry,
    RpcWorker,
    devices_of,
    is_auto,
    resolve,
)
from supervisor.plan.setting import CORRAL, DEFAULTS, FlagName, FlagSetting, SettingsByFlag, values
from supervisor.system.machine import Machine


def reason_against(key: str, inputs: PlanInputs, chosen: Chosen) -> str | None:
    reason = None
    match key:
        case "gpu-layers" if not inputs.device_bytes and "rpc" not in chosen:
            reason = "the engine lists no device"
        case "load-mode":
            reason = _reason_against_lock(inputs, chosen)
        case "prio" if str(chosen["prio"]) not in {"0", "-1"} and not inputs.machine.may_renice:
            reason = "raising the priority is not permitted"
        case "numa" if chosen["numa"] == "distribute" and inputs.machine.numa_nodes <= 1:
            # Each thread is pinned to all CPUs of a node, also to CPUs outside the affinity.
            # Source: llama.cpp, ggml-cpu.c, set_numa_thread_affinity.
            reason = "there is one NUMA node, or not all CPUs of each may be used"
        case "cache-type-k" | "cache-type-v":
            reason = _reason_against_cache_type(inputs, chosen, key)
    return reason


def _reason_against_lock(inputs: PlanInputs, chosen: Chosen) -> str | None:
    weights, allowed = inputs.gguf.tensor_bytes, inputs.machine.memlock_bytes
    if "mlock" not in str(chosen["load-mode"]):
        return None
    if inputs.device_bytes:
        return "the weights go to the device and need not be locked in main memory"
    if allowed is not None and allowed < weights:
        return f"{weights >> 20} MiB cannot be locked: the limit is {allowed >> 20} MiB"
    if weights > inputs.machine.memory_bytes // 2:
        return "locking more than half of the memory would starve other programs"
    return None


def _reason_against_cache_type(inputs: PlanInputs, chosen: Chosen, key: str) -> str | None:
    if chosen[key] in kv_cache.UNQUANTISED:
        return None
    if key == "cache-type-v" and chosen.get("flash-attn") in {"off", False}:
        return "a quantised V cache needs flash attention"
    if kv_cache.can_quantise(inputs.gguf):
        return None
    return f"heads of {inputs.gguf.key_length} values are not multiples of {kv_cache.BLOCK}"


__all__ = ["ModelEntry", "Plan", "PlanLine", "check", "make_plan", "unix_sockets"]


_ALONE: Final = Draft()


@dataclass(frozen=True, slots=True)
class PlanLine:
    """An option, on the command line or omitted."""

    flag: str  # in the build's spelling; if omitted, today's name with dashes
    value: str | None  # the word after it, or None
    origin: str  # `model NAME`, `batching`, `profile NAME`, `machine`, `gguf` or `llama-corral`
    reason: str  # a clause; empty if the origin says it all


@dataclass(frozen=True, slots=True)
class Plan:
    """The command line and properties of a model's instances."""

    model: str
    engine: Engine
    gguf: Gguf
    lines: tuple[PlanLine, ...]  # in order, without the address to listen on, which `argv` adds
    omitted: tuple[PlanLine, ...]  # settings that are not on the command line
    warnings: tuple[str, ...]  # sentences for the user
    slots: int  # sequences decoded at once
    ctx_size: int  # tokens of context of all slots together; 0 if the engine decides
    memory_inputs: MemoryInputs
    # Values on the command line that the daemon changed while it serves.
    adapted: SettingsByFlag = field(default_factory=dict)
    derived: frozenset[str] = frozenset()  # the options that were `auto`
    untried_threads: int | None = None  # the thread count that its first run measures
    workers: tuple[RpcWorker, ...] = ()  # workers that compute its layers, in the order of --rpc
    lost_workers: tuple[str, ...] = ()  # sentences on workers that it runs without
    tuned: tuple[str, ...] = ()  # why its tuned profile is unused, or was measured elsewhere
    from_user: frozenset[str] = frozenset()  # the options that the model's own table decides
    # Settings reduced after its engine ran out of memory.
    reduced: SettingsByFlag = field(default_factory=dict)
    missing_draft: tuple[str, ...] = ()  # why it runs without the configured draft model
    # The name of its `DraftSpeed`; None if it is not decided by speed whether it drafts.
    draft_key: str | None = None

    @property
    def embedding(self) -> Embedding | None:
        return embedding(self.gguf, self.memory_inputs.chosen)

    @property
    def has_chosen_adapters(self) -> bool:
        """Whether each request gives the scales of its adapters (`[models.NAME.loras]`)."""
        return any(line.flag == f"--{SCALED}" and line.origin == CORRAL for line in self.lines)

    @property
    def has_own_slots(self) -> bool:
        """Whether the proxy can choose slots, each with its own cache."""
        chosen, use = self.memory_inputs.chosen, self.embedding
        if use and use.is_only:
            return False
        return chosen.get("slot-prompt-similarity") == 0 and chosen.get("kv-unified") is False

    @property
    def is_speculative(self) -> bool:
        return self.memory_inputs.chosen.get("spec-type", "none") != "none"

    @property
    def resumable_prompts(self) -> int:
        """See the proxy's `Upstream`.

        Source: measured on build 10434 with its default spacing: a history whose last message was
        edited finds the checkpoint before it (862 tokens); an earlier edit finds nothing.
        """
        if not self.gguf.recurrent:
            return 0
        known = self.engine.flags.find("ctx-checkpoints") is not None
        return 2 if known and self.memory_inputs.chosen.get("ctx-checkpoints") != 0 else 1

    @property
    def window_tokens(self) -> int:
        """See the proxy's `Upstream`."""
        return 0 if self.memory_inputs.chosen.get("swa-full") else self.gguf.sliding_window or 0

    @property
    def micro_batch_tokens(self) -> int:
        """See the proxy's `Upstream`."""
        return context_layout(self.gguf, self.memory_inputs.chosen, self.engine).tokens

    @property
    def has_prompt_cache(self) -> bool:
        """Whether the engine keeps prompts in main memory after their slot is reused."""
        known = self.engine.flags.find("cache-ram") is not None
        return known and self.memory_inputs.chosen.get("cache-ram") != 0

    @property
    def estimate(self) -> Estimate:
        return estimate(self.memory_inputs)

    def argv(self, *, host: str, port: int | None, rpc: str | None = None) -> tuple[str, ...]:
        """Return the command line, beginning with the engine's `command`.

        `host` is an address, or the path of a unix socket that ends in `.sock`; then `port` is
        None. Port 0 lets the system choose. `rpc` are addresses for the workers instead of their
        own.
        """
        words = [*self.engine.command, "--host", host]
        words += [] if port is None else ["--port", str(port)]
        for line in self.lines:
            value = rpc if rpc and line.flag == f"--{RPC}" else line.value
            words += [line.flag] if value is None else [line.flag, value]
        return tuple(words)


def make_plan(  # noqa: PLR0913 (a plan is made of all these)
    entry: ModelEntry,
    profile: Profile,
    engine: Engine,
    gguf: Gguf,
    machine: Machine,
    *,
    instances: int,
    draft: Draft = _ALONE,
    projector_bytes: int = 0,
    adapted: SettingsByFlag = MappingProxyType({}),
    measured: Mapping[int, ThreadSpeeds] | None = None,
    saves_slots: bool = True,
) -> Plan:
    """Plan the instances of a model; `instances` processes of all models share the machine.

    `saves_slots`: whether slot files may replace the cache-ram of an engine with a draft model.

    Raises SettingsInvalid: no build has a flag, or this build would reject a value.
    """
    remote = devices_of(entry.workers)
    devices = () if remote else engine.devices
    # Main memory of a worker limits all of them.
    counted = () if any(device.is_main_memory for device in remote) else remote
    in_file, _ = repacked_bytes(gguf, machine.cpu_flags, engine)
    inputs = PlanInputs(
        gguf=gguf,
        machine=machine,
        device_bytes=sum(device.total_mib for device in devices) * 1024**2,
        worker_bytes=sum(device.total_mib for device in counted) * 1024**2,
        instances=max(1, instances),
        adapted={key: replace(setting, is_adapted=True) for key, setting in adapted.items()},
        measured=measured,
        ctx_each=entry.batching.max_context_length,
        draft=draft.gguf,
        spec_types=offered_types(engine.flags),
        saves_slots=saves_slots,
        repacked_bytes=0 if devices or remote else in_file,
    )
    settings, kept, barred = _choose_settings(entry, profile, engine, inputs, draft)
    chosen = values(kept)
    origins = {key: setting.origin for key, setting in kept.items()}
    rendered, omitted = render(chosen, engine.flags, origins)
    return Plan(
        model=entry.name,
        engine=engine,
        gguf=gguf,
        lines=_lines(entry, gguf, rendered, kept),
        omitted=_omissions(entry, [*barred, *omitted], settings),
        warnings=(*_warnings(inputs, engine, chosen), *draft.warnings),
        slots=slots(chosen),
        ctx_size=ctx_slot(chosen) * cache_count(chosen),
        memory_inputs=MemoryInputs(
            gguf=gguf,
            chosen={line.key: chosen[line.key] for line in rendered},
            engine=replace(engine, devices=(*remote, *engine.devices)),
            cpu_flags=machine.cpu_flags,
            draft=draft.gguf if "spec-draft-model" in chosen else None,
            projector_bytes=projector_bytes,
        ),
        adapted={key: setting for key, setting in kept.items() if setting.is_adapted},
        derived=frozenset(key for key, setting in kept.items() if setting.is_derived),
        untried_threads=inputs.untried_threads if _derives_threads(kept) else None,
        workers=entry.workers,
        from_user=frozenset(_user_options(kept, entry, engine.flags)),
        reduced={key: setting for key, setting in entry.reduced.items() if key in kept},
        missing_draft=draft.warnings if isinstance(entry.draft, Path) and not draft.gguf else (),
    )


def _choose_settings(
    entry: ModelEntry, profile: Profile, engine: Engine, inputs: PlanInputs, draft: Draft
) -> tuple[SettingsByFlag, SettingsByFlag, list[OmittedFlag]]:
    """Return all settings, those that can work on this machine, and the other ones."""
    settings = resolve(entry, profile, engine.flags, inputs, draft, engine.devices)
    chosen = values(settings)
    reasons = {key: reason_against(key, inputs, chosen) for key in settings}
    kept = {key: setting for key, setting in settings.items() if not reasons[key]}
    barred = [(key, chosen[key], reason) for key, reason in reasons.items() if reason]
    if draft.reason and not draft.gguf:
        barred.append(("spec-draft-model", str(entry.draft), draft.reason))
    return settings, kept, barred


def _derives_threads(settings: SettingsByFlag) -> bool:
    found = [settings.get(key) for key in ("threads", "threads-batch")]
    return all(each and each.origin == "machine" and not each.is_adapted for each in found)


def _user_options(settings: SettingsByFlag, entry: ModelEntry, flags: Flags) -> Iterator[str]:
    """Yield the options that the model's table sets; words of `args` come last and win."""
    words = {word.partition("=")[0] for word in entry.args}
    for key, setting in settings.items():
        flag = flags.find(key)
        if setting.is_from_user or (flag and words.intersection(flag.names)):
            yield key


def check(profile: Profile, flags: Flags) -> tuple[list[RenderedFlag], list[OmittedFlag]]:
    """Render a profile's flags without the `auto` ones; raises as `make_plan`."""
    with errors_of(f"profile {profile.name}"):
        own = [canonical(name, value, flags) for name, value in profile.flags.items()]
        return render({key: value for key, value in own if not is_auto(key, value)}, flags)


def unix_sockets(engine: Engine) -> bool:
    """Return whether the engine can listen on a unix socket, from its help of `--host`."""
    host = engine.flags.find("host")
    return host is not None and ".sock" in host.help


def _lines(
    entry: ModelEntry, gguf: Gguf, rendered: list[RenderedFlag], settings: SettingsByFlag
) -> tuple[PlanLine, ...]:
    origin = f"model {entry.name}"
    return (
        PlanLine("--model", str(gguf.path), origin, ""),
        PlanLine("--alias", entry.name, CORRAL, "responses name the model as clients do"),
        *(
            PlanLine(
                line.flag,
                line.value,
                settings[line.key].origin,
                "; ".join(filter(None, (settings[line.key].reason, line.note))),
            )
            for line in rendered
        ),
        *(PlanLine(word, None, origin, "passed on unchecked") for word in entry.args),
    )


def _omissions(
    entry: ModelEntry, left_out: list[OmittedFlag], settings: SettingsByFlag
) -> tuple[PlanLine, ...]:
    """Return omitted settings, except our own defaults, which not every build needs to have."""
    origins = {key: setting.origin for key, setting in settings.items()}
    return tuple(
        PlanLine(
            flag=f"--no-{key}" if value is False else f"--{key}",
            value=None if isinstance(value, bool) else str(value),
            origin=origins.get(key, f"model {entry.name}"),
            reason=reason,
        )
        for key, value, reason in left_out
        if not (key in DEFAULTS and origins[key] == CORRAL)
    )


def _warnings(inputs: PlanInputs, engine: Engine, chosen: Mapping[str, FlagValue]) -> Iterator[str]:
    if engine.warning:
        yield engine.warning
    trained = inputs.gguf.ctx_train
    if trained and ctx_slot(chosen) > trained:
        yield f"{ctx_slot(chosen)} tokens per slot exceed the model's training context of {trained}"


class TrialSettings(SettingsTable):
    """`[models.NAME.trial]`: settings of an additional replica for a share of conversations."""

    profile: Text | None = None
    """the profile on trial; unset: the model's own, with other flags"""
    engine: EngineField | None = None
    """the engine on trial; unset: the model's own"""
    share: float = Field(gt=0, lt=1)
    """share of new conversations that the trial gets, between 0 and 1"""
    flags: dict[FlagName, FlagSetting] = Field(default_factory=dict)
    """flags on trial; they override the model's own"""

    @model_validator(mode="after")
    def _differs(self) -> Self:
        if self.profile is None and self.engine is None and not self.flags:
            raise ValueError("give a profile, flags or an engine to try")
        return self

    def label(self, own_profile: str) -> str:
        """Return the profile, flags and engine on trial, for people."""
        flags = ", ".join(f"{key} = {value}" for key, value in self.flags.items())
        with_flags = " with ".join(filter(None, (self.profile or own_profile, flags)))
        return f"{with_flags} on {self.engine}" if self.engine else with_flags

    def apply_to(self, entry: ModelEntry) -> ModelEntry:
        return replace(
            entry,
            profile=self.profile or entry.profile,
            flags={**entry.flags, **self.flags},
            engine=self.engine or entry.engine,
        )


class CanaryTrial(TrialSettings):
    """The trial of a canary, which changes only the engine and is not in `corral.toml`."""


def extend_context(entry: ModelEntry, plan: Plan, trial: Plan) -> ModelEntry | None:
    """Give a trial's slots the context of the model's slots; None if they have it.

    A conversation that fits the model must not be refused because it is part of a trial.
    """
    wanted, given = (ctx_slot(side.memory_inputs.chosen) for side in (plan, trial))
    if given == 0 or 0 < wanted <= given:
        return None
    ctx_size = wanted * cache_count(trial.memory_inputs.chosen)
    return replace(entry, flags={**entry.flags, "ctx-size": ctx_size})
