"""Derives the flags that a profile sets to `auto` from the machine and the model. Pure.

Each function decides one value with its reason, in the order of AUTO_VALUES, and sees the values
chosen before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from supervisor.engines.help import FlagValue
from supervisor.engines.spec_types import MTP
from supervisor.errors import SettingsInvalid
from supervisor.flags.draft_heads import SIMPLE, draft_type, reason_against_mtp
from supervisor.flags.setting import BATCHING, CORRAL, Setting, Settings
from supervisor.flags.thread_speeds import ThreadMeasurement, fastest
from supervisor.gguf.embedding import embedding
from supervisor.gguf.metadata import Gguf
from supervisor.host.machine import Machine
from supervisor.memory import kv_cache
from supervisor.memory.compute import compute_bytes
from supervisor.memory.context import NUMBER_MAX, Chosen, ContextLayout
from supervisor.memory.kv_cache import Cache

AUTO: Final = "auto"
_MIB: Final = 1024**2

# Prefill speed of one core of a server CPU of 2020 or later: SmolLM2-135M, Q4_1, f16 cache, build
# 10434: 165 tokens/s per core x 135 M weights x 2 = 45e9 operations per second.
_CORE_FLOPS: Final = 40e9
_BATCH_S: Final = 0.5
_BATCH_MIN: Final = 32
_BATCH_MAX: Final = 2048
_UBATCH_MAX: Final = 512
_SLOTS: Final = 4
_MANY_SLOTS: Final = 8
_CTX_SLOT: Final = 8192
# More would only cost memory: many slots serve short requests.
_CTX_TOTAL: Final = 65536
_CTX_SLOT_MIN: Final = 512
_CACHE_RAM_MAX_MIB: Final = 8192
# LLAMA_MAX_SEQ of llama.cpp is 256; builds may be compiled with more.
MOST: Final[Mapping[str, int]] = MappingProxyType({"parallel": 1024})


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """What derived values depend on."""

    gguf: Gguf
    machine: Machine
    device_bytes: int  # memory of all devices that layers can be offloaded to; 0 without a device
    instances: int  # processes that share the machine
    worker_bytes: int = 0  # memory of all RPC workers on other machines
    # Values that the daemon changed while it serves; they replace what would be derived.
    adapted: Settings = field(default_factory=dict)
    measured: ThreadMeasurement | None = None  # None: thread counts are not measured
    ctx_each: int | None = None  # tokens of context that each slot is set to have
    draft: Gguf | None = None  # the draft model, or None
    spec_types: tuple[str, ...] = ()  # ways of drafting that the build has

    @property
    def cores(self) -> int:
        """The cores of one instance."""
        return max(1, self.machine.decode_cores // self.instances)

    @property
    def untried_threads(self) -> int | None:
        """The thread count whose speed the next run is to measure; None on devices."""
        if self.measured is None or self.device_bytes:
            return None
        return self.measured.untried(self.cores)

    @property
    def share_bytes(self) -> int:
        """Memory that one instance may use beside the weights.

        On a device, nine tenths of it without the weights; in main memory, three quarters without
        the weights, which instances of one model share by mapping the file. At least an eighth of
        the memory, so that there is a plan at all.
        """
        if self.worker_bytes:  # for one engine alone
            room = self.worker_bytes * 9 // 10 - self.gguf.tensor_bytes
            return max(room, self.worker_bytes // 8)
        if self.device_bytes:
            room = self.device_bytes * 9 // 10 - self.gguf.tensor_bytes
            return max(room, self.device_bytes // 8) // self.instances
        memory = self.machine.memory_bytes
        return max(memory * 3 // 4 - self.gguf.tensor_bytes, memory // 8) // self.instances

    @property
    def kv_budget_bytes(self) -> int:
        """Limit of the KV cache: the device's whole share, or half of main memory's."""
        return self.share_bytes if self.device_bytes else self.share_bytes // 2


def slots(chosen: Chosen) -> int:
    """The number of slots."""
    return positive("parallel", chosen.get("parallel", _SLOTS))


def cache_count(chosen: Chosen) -> int:
    """The number of caches that share the context: one per slot, or one if unified."""
    return 1 if chosen.get("kv-unified") is True else slots(chosen)


def ctx_slot(chosen: Chosen) -> int:
    """The chosen context of one slot, in tokens; 0 for the model's."""
    ctx = chosen.get("ctx-size", 0)
    return positive("ctx-size", ctx) // cache_count(chosen) if ctx else 0


def positive(key: str, value: FlagValue) -> int:
    """The value of an option as a number; raises SettingsInvalid unless it is in range."""
    try:
        number = int(value)
    except (ValueError, OverflowError):  # a text; infinity
        number = 0
    most = MOST.get(key, NUMBER_MAX)
    if not 1 <= number <= most:
        raise SettingsInvalid(f"{key} = {value} is invalid", hint=f"use a number from 1 to {most}")
    return number


def _parallel(_inputs: PlanInputs, _chosen: Chosen) -> Setting:
    return Setting(_SLOTS, CORRAL, "enough for a few conversations at once")


def _threads(inputs: PlanInputs, _chosen: Chosen) -> Setting:
    """Threads that decode one sequence: the fastest count, or all cores if none was measured."""
    return _fastest(inputs, inputs.measured.decode() if inputs.measured else {}, "one sequence")


def _threads_batch(inputs: PlanInputs, chosen: Chosen) -> Setting:
    """Threads that compute prompts, and several sequences at once.

    With many slots, sequences take more of the time than prompts.
    """
    measured = inputs.measured or ThreadMeasurement()
    if slots(chosen) >= _MANY_SLOTS and measured.together():
        return _fastest(inputs, measured.together(), "many sequences")
    return _fastest(inputs, measured.prefill(), "prompts")


def _fastest(inputs: PlanInputs, speeds: Mapping[int, float], what: str) -> Setting:
    cores, untried = inputs.cores, inputs.untried_threads
    shared = _counted(inputs.machine.decode_cores, inputs.machine.decode_core_kind)
    shared += f" for {_counted(inputs.instances, 'instance')}"
    if untried:
        return Setting(untried, "machine", f"{shared}; speeds are measured at the first start")
    count = fastest(speeds, cores)
    if count == cores:
        return Setting(count, "machine", shared)
    reason = f"{what}: {speeds[count]:.0f} tokens/s, {speeds[cores]:.0f} with {cores} threads"
    return Setting(count, "machine", reason)


def _batch_size(inputs: PlanInputs, chosen: Chosen) -> Setting:
    """Tokens of prompts in one batch, and with them the longest pause of a running stream."""
    found = _batch_by_speed(inputs, chosen)
    # One that is not set yet follows the batch size.
    ubatch = positive("ubatch-size", chosen.get("ubatch-size", 1))
    if ubatch > int(found.value):
        return Setting(ubatch, CORRAL, "a batch holds a whole ubatch-size")
    return found


def _batch_by_speed(inputs: PlanInputs, chosen: Chosen) -> Setting:
    if inputs.device_bytes:
        return Setting(
            _BATCH_MAX, "machine", "a device processes this many tokens in well under a second"
        )
    if inputs.untried_threads:
        return Setting(_UBATCH_MAX, "machine", "the rate of prefill is measured at the first start")
    rate = _prompt_rate(inputs, chosen)
    size = 2 ** math.ceil(math.log2(max(1, rate * _BATCH_S)))
    reason = f"half a second to a second of prefill at {rate:.0f} tokens/s on this CPU"
    return Setting(min(_BATCH_MAX, max(_BATCH_MIN, size)), "machine", reason)


def _prompt_rate(inputs: PlanInputs, chosen: Chosen) -> float:
    """Prompt tokens per second on the CPU, as measured, or by two operations per weight."""
    threads = chosen.get("threads-batch")
    cores = threads if isinstance(threads, int) and threads > 0 else inputs.machine.decode_cores
    measured = inputs.measured.prefill() if inputs.measured else {}
    if cores in measured:
        return measured[cores]
    return cores * _CORE_FLOPS / (2 * max(1, inputs.gguf.parameters))


def _ubatch_size(_inputs: PlanInputs, chosen: Chosen) -> Setting:
    batch = positive("batch-size", chosen.get("batch-size", _BATCH_MAX))
    return Setting(min(_UBATCH_MAX, batch), CORRAL, "at most the batch size and 512")


def _cache_type(inputs: PlanInputs, chosen: Chosen) -> Setting:
    gguf = inputs.gguf
    if not kv_cache.can_quantise(gguf):
        sizes = f"heads of {gguf.key_length} and {gguf.value_length} values"
        return Setting("f16", "gguf", f"{sizes} are not multiples of {kv_cache.BLOCK}")
    if inputs.device_bytes:
        return Setting("q8_0", "machine", "halves the cache at almost no cost on a device")
    ctx = ctx_slot(chosen) or inputs.ctx_each or _wanted_ctx(gguf, cache_count(chosen))
    wanted = kv_cache.cache_bytes(gguf, cache_layout(chosen, ctx, "f16", "f16"))
    if wanted > inputs.kv_budget_bytes:
        reason = f"in f16 the cache would take {wanted // _MIB} MiB of this machine's memory"
        return Setting("q8_0", "machine", reason)
    return Setting("f16", "machine", "on a CPU q8_0 slows prefill, and memory suffices")


def _ctx_size(inputs: PlanInputs, chosen: Chosen) -> Setting:
    count = cache_count(chosen)
    if each := inputs.ctx_each:
        reason = f"max_context_length: {_counted(count, 'slot')}, {each} tokens per slot"
        return Setting(each * count, BATCHING, reason)
    types = str(chosen.get("cache-type-k", "f16")), str(chosen.get("cache-type-v", "f16"))
    wanted = fitting = _wanted_ctx(inputs.gguf, count)
    while (
        fitting > _CTX_SLOT_MIN
        and context_bytes(inputs.gguf, chosen, cache_layout(chosen, fitting, *types))
        > inputs.kv_budget_bytes
    ):
        fitting = max(_CTX_SLOT_MIN, fitting // 2)
    if fitting < wanted:
        reason, origin = f"{fitting} tokens per slot fit into memory", "machine"
    elif wanted == inputs.gguf.ctx_train:
        reason, origin = f"{wanted} tokens per slot, the model's training context", "gguf"
    else:
        reason, origin = f"{wanted} tokens per slot", CORRAL
    return Setting(fitting * count, origin, f"{_counted(count, 'slot')}, {reason}")


def context_bytes(gguf: Gguf, chosen: Chosen, cache: Cache) -> int:
    """Bytes that grow with a context: the cache, and the compute buffer of embeddings."""
    use = embedding(gguf, chosen)
    if use is None:
        return kv_cache.cache_bytes(gguf, cache)
    tokens = use.micro_batch(cache.ctx)
    numbers = ContextLayout(
        cache=cache,
        tokens=tokens,
        outputs=tokens if gguf.is_causal else 0,
        flash=chosen.get("flash-attn") not in {"off", False},
        prompt_cache_bytes=0,
        checkpoints=0,
    )
    return kv_cache.cache_bytes(gguf, cache) + compute_bytes(gguf, numbers)


def cache_layout(chosen: Chosen, ctx: int, type_k: str, type_v: str) -> Cache:
    return Cache(
        ctx=ctx,
        streams=cache_count(chosen),
        slots=slots(chosen),
        ubatch=positive("ubatch-size", chosen.get("ubatch-size", _UBATCH_MAX)),
        type_k=type_k,
        type_v=type_v,
        full_window=chosen.get("swa-full") is True,
    )


def _wanted_ctx(gguf: Gguf, count: int) -> int:
    shared = max(_CTX_SLOT_MIN, _CTX_TOTAL // count)
    return min(gguf.ctx_train or _CTX_SLOT, _CTX_SLOT, shared)


def _cache_ram(inputs: PlanInputs, _chosen: Chosen) -> Setting:
    memory = inputs.machine.memory_bytes
    share = max(memory * 3 // 4 - inputs.gguf.tensor_bytes, memory // 8) // inputs.instances // 4
    reason = f"a quarter of one instance's share of {memory // _MIB} MiB memory"
    return Setting(min(_CACHE_RAM_MAX_MIB, share // _MIB), "machine", reason)


def _fit(inputs: PlanInputs, _chosen: Chosen) -> Setting:
    if inputs.device_bytes:
        return Setting("on", "machine", "the engine fits the model to its devices")
    return Setting(
        "off", "machine", "without a device there is nothing to fit; the start is faster"
    )


def _spec_type(inputs: PlanInputs, chosen: Chosen) -> Setting:
    if "spec-draft-model" in chosen:
        kind = draft_type(inputs.draft) if inputs.draft else SIMPLE
        return Setting(kind, CORRAL, "a draft model is set")
    reason = "without a draft model, repeated text can be predicted"
    if inputs.gguf.draft_layers:
        against = reason_against_mtp(inputs.gguf, inputs.spec_types)
        if against is None:
            return Setting(MTP, "gguf", "the model has layers that draft (MTP)")
        reason = f"{against}; repeated text can be predicted"
    return Setting("ngram-mod", CORRAL, reason)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# In the order of decision.
AUTO_VALUES: Final[Mapping[str, Callable[[PlanInputs, Chosen], Setting]]] = MappingProxyType(
    {
        "parallel": _parallel,
        "threads": _threads,
        "threads-batch": _threads_batch,
        "batch-size": _batch_size,
        "ubatch-size": _ubatch_size,
        "cache-type-k": _cache_type,
        "cache-type-v": _cache_type,
        "ctx-size": _ctx_size,
        "cache-ram": _cache_ram,
        "fit": _fit,
        "spec-type": _spec_type,
    }
)
