"""Plans the command line of a model, with the origin of each word. Pure.

Settings are merged and every `auto` derived (resolve.py, auto.py); what cannot work here is omitted
(constraints.py); the rest is rendered for the engine at hand (render.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Final

from proxy.upstream.upstream import BATCH_TOKENS
from supervisor.engines.discover import Device, Engine
from supervisor.engines.help import Flags, FlagValue
from supervisor.flags.auto import PlanInputs, cache_count, ctx_slot, slots
from supervisor.flags.constraints import reason_against
from supervisor.flags.draft_heads import offered_types
from supervisor.flags.draft_model import Draft
from supervisor.flags.profile import Profile
from supervisor.flags.render import OmittedFlag, Rendered, canonical, render
from supervisor.flags.resolve import CORRAL_DEFAULTS, ModelEntry, is_auto, resolve
from supervisor.flags.setting import CORRAL, Settings, values
from supervisor.flags.thread_speeds import ThreadMeasurement
from supervisor.flags.workers import RPC, RpcWorker, devices_of
from supervisor.gguf.embedding import Embedding, embedding
from supervisor.gguf.metadata import Gguf
from supervisor.host.machine import Machine
from supervisor.memory.estimate import Estimate, MemoryInputs, estimate

__all__ = ["ModelEntry", "Plan", "PlanLine", "check", "make_plan", "unix_sockets"]


_ALONE: Final = Draft()


@dataclass(frozen=True, slots=True)
class PlanLine:
    """One option, on the command line or omitted."""

    flag: str  # as the build spells it; of an omitted one, today's name with dashes
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
    # Values that the daemon changed while it serves, as they are on the command line.
    adapted: Settings = field(default_factory=dict)
    derived: frozenset[str] = frozenset()  # the options that were `auto`
    untried_threads: int | None = None  # the thread count whose speed its first run measures
    workers: tuple[RpcWorker, ...] = ()  # those that compute its layers, in the order of --rpc
    # Workers that it runs without, as sentences.
    lost_workers: tuple[str, ...] = ()
    from_user: frozenset[str] = frozenset()  # the options that the model's own table decides
    # What it gave up after its engine ran out of memory.
    reduced: Settings = field(default_factory=dict)
    missing_draft: tuple[str, ...] = ()  # why it runs without the draft model that is set

    @property
    def embedding(self) -> Embedding | None:
        return embedding(self.gguf, self.memory_inputs.chosen)

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
    def batch_tokens(self) -> int:
        """The most tokens in one pass; llama-server's default where the engine decides."""
        size = self.memory_inputs.chosen.get("batch-size", BATCH_TOKENS)
        return size if isinstance(size, int) and size > 0 else BATCH_TOKENS

    @property
    def resumable_prompts(self) -> int:
        """As of the proxy's `Upstream`.

        Source: measured on build 10434 with its default spacing: a history of which the last
        message was edited finds the checkpoint before it (862 tokens), an earlier one nothing.
        """
        if not self.gguf.recurrent:
            return 0
        known = self.engine.flags.find("ctx-checkpoints") is not None
        return 2 if known and self.memory_inputs.chosen.get("ctx-checkpoints") != 0 else 1

    @property
    def has_window(self) -> bool:
        """As of the proxy's `Upstream`."""
        return bool(self.gguf.sliding_window) and not self.memory_inputs.chosen.get("swa-full")

    @property
    def has_prompt_cache(self) -> bool:
        """Whether the engine keeps prompts in main memory when their slot is reused."""
        known = self.engine.flags.find("cache-ram") is not None
        return known and self.memory_inputs.chosen.get("cache-ram") != 0

    @property
    def estimate(self) -> Estimate:
        return estimate(self.memory_inputs)

    def argv(self, *, host: str, port: int | None, rpc: str | None = None) -> tuple[str, ...]:
        """The command line, the engine's `command` first.

        Args:
            host: An address, or the path of a unix socket that ends in `.sock`.
            port: None for a unix socket; 0 lets the system choose.
            rpc: Where the workers are reached, if not at their own addresses.
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
    adapted: Settings = MappingProxyType({}),
    measured: ThreadMeasurement | None = None,
) -> Plan:
    """Plan the instances of a model; `instances` processes of all models share the machine.

    Raises:
        SettingsInvalid: A flag that no build has, or a value that this build would reject.
    """
    remote = devices_of(entry.workers)
    devices = () if remote else engine.devices
    inputs = PlanInputs(
        gguf=gguf,
        machine=machine,
        device_bytes=sum(device.total_mib for device in devices) * 1024**2,
        worker_bytes=_worker_bytes(remote),
        instances=max(1, instances),
        adapted={key: replace(one, is_adapted=True) for key, one in adapted.items()},
        measured=measured,
        ctx_each=entry.batching.max_context_length,
        draft=draft.gguf,
        spec_types=offered_types(engine.flags),
    )
    settings = resolve(entry, profile, engine.flags, inputs, draft, engine.devices)
    kept, barred = without_conflicts(settings, inputs)
    chosen = values(kept)
    rendered = render(chosen, engine.flags)
    if draft.reason and not draft.gguf:
        barred.append(OmittedFlag("spec-draft-model", str(entry.draft), draft.reason))
    return Plan(
        model=entry.name,
        engine=engine,
        gguf=gguf,
        lines=_lines(entry, gguf, rendered, kept),
        omitted=_omissions(entry, [*barred, *rendered.omitted], settings),
        warnings=(*_warnings(inputs, engine, chosen), *draft.warnings),
        slots=slots(chosen),
        ctx_size=ctx_slot(chosen) * cache_count(chosen),
        memory_inputs=MemoryInputs(
            gguf=gguf,
            chosen={line.key: chosen[line.key] for line in rendered.lines},
            engine=replace(engine, devices=(*remote, *engine.devices)),
            cpu_flags=machine.cpu_flags,
            draft=draft.gguf,
            projector_bytes=projector_bytes,
        ),
        adapted={key: one for key, one in kept.items() if one.is_adapted},
        derived=frozenset(key for key, one in kept.items() if one.is_derived),
        untried_threads=inputs.untried_threads if _derives_threads(kept) else None,
        workers=entry.workers,
        from_user=frozenset(_from_user(kept, entry, engine.flags)),
        reduced={key: one for key, one in entry.reduced.items() if key in kept},
        missing_draft=draft.warnings if isinstance(entry.draft, Path) and not draft.gguf else (),
    )


def _worker_bytes(devices: tuple[Device, ...]) -> int:
    """Memory of workers elsewhere; 0 if one takes main memory, which then limits all."""
    if any(one.is_main_memory for one in devices):
        return 0
    return sum(one.total_mib for one in devices) * 1024**2


def _derives_threads(settings: Settings) -> bool:
    keys = "threads", "threads-batch"
    found = [settings[key] for key in keys if key in settings]
    return len(found) == 2 and all(one.origin == "machine" and not one.is_adapted for one in found)


def _from_user(settings: Settings, entry: ModelEntry, flags: Flags) -> Iterator[str]:
    """Yield the options that the model's table sets; words of `args` go last, and win."""
    words = {word.partition("=")[0] for word in entry.args}
    for key, one in settings.items():
        flag = flags.find(key)
        if one.is_from_user or (flag and words.intersection(flag.names)):
            yield key


def check(profile: Profile, flags: Flags) -> Rendered:
    """Render a profile's own flags, without those to be derived; raises as `make_plan`."""
    own = (canonical(name, value, flags) for name, value in profile.flags.items())
    return render({key: value for key, value in own if not is_auto(key, value)}, flags)


def unix_sockets(engine: Engine) -> bool:
    """Whether the engine can listen on a unix socket, according to its help of `--host`."""
    host = engine.flags.find("host")
    return host is not None and ".sock" in host.help


def without_conflicts(settings: Settings, inputs: PlanInputs) -> tuple[Settings, list[OmittedFlag]]:
    chosen = values(settings)
    reasons = {key: reason_against(key, inputs, chosen) for key in settings}
    kept = {key: one for key, one in settings.items() if not reasons[key]}
    return kept, [
        OmittedFlag(key, chosen[key], reason) for key, reason in reasons.items() if reason
    ]


def _lines(
    entry: ModelEntry, gguf: Gguf, rendered: Rendered, settings: Settings
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
                "; ".join(filter(None, [settings[line.key].reason, line.note])),
            )
            for line in rendered.lines
        ),
        *(PlanLine(word, None, origin, "passed on unchecked") for word in entry.args),
    )


def _omissions(
    entry: ModelEntry, left_out: list[OmittedFlag], settings: Settings
) -> tuple[PlanLine, ...]:
    """Omitted settings, except our own defaults: those are for builds that have them."""
    origins = {key: one.origin for key, one in settings.items()}
    return tuple(
        PlanLine(
            flag=f"--no-{one.key}" if one.value is False else f"--{one.key}",
            value=None if isinstance(one.value, bool) else str(one.value),
            origin=origins.get(one.key, f"model {entry.name}"),
            reason=one.reason,
        )
        for one in left_out
        if not (one.key in CORRAL_DEFAULTS and origins[one.key] == CORRAL)
    )


def _warnings(inputs: PlanInputs, engine: Engine, chosen: Mapping[str, FlagValue]) -> Iterator[str]:
    if engine.warning:
        yield engine.warning
    trained = inputs.gguf.ctx_train
    if trained and ctx_slot(chosen) > trained:
        yield f"{ctx_slot(chosen)} tokens per slot exceed the model's training context of {trained}"
