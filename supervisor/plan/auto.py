"""Derives the values of flags that are `auto` from the machine and the model. Pure.

Each function in AUTO_VALUES decides a value with its reason, in that order, and sees the values
chosen before.

Thread counts are chosen by measured speeds. Threads synchronise after each operation of a graph,
and the cost of that depends on the machine. With SmolLM2-135M on 2 virtual cores (build 10434), a
single sequence made 118 tokens/s with 2 threads and 70 with 1 on one host, but 32 and 135 on
another; both were idle. `threads-batch` is for batches with a prompt or several sequences: on the
second host, 8 sequences made 117 tokens/s with 2 threads and 294 with 1, a prompt 850 and 460.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from supervisor.builds.help import MTP, FlagValue, has_draft_cache
from supervisor.errors import SettingsInvalid
from supervisor.models.metadata import Gguf
from supervisor.plan import context, kv_cache
from supervisor.plan.draft import SIMPLE, draft_type, reason_against_mtp
from supervisor.plan.kv_cache import Cache
from supervisor.plan.setting import BATCHING, CORRAL, Setting, SettingsByFlag, values
from supervisor.system.machine import Machine

# Another count replaces the usual one if it is faster by this factor.
_GAIN_MIN: Final = 1.05
COUNTS_MAX: Final = 3


@dataclass(frozen=True, slots=True)
class ThreadSpeeds:
    """Tokens per second with a number of threads; None if not measured."""

    decode: float  # a single sequence
    prefill: float | None = None
    together: float | None = None  # the sum of several sequences


def next_untried(speeds: Collection[int], cores: int) -> int | None:
    return next((count for count in thread_counts(cores) if count not in speeds), None)


def thread_counts(cores: int) -> tuple[int, ...]:
    """Return the thread counts to compare: all cores, all but one, and half of them."""
    return tuple(dict.fromkeys(max(1, count) for count in (cores, cores - 1, cores // 2)))


def fastest_count(speeds: Mapping[int, float], cores: int) -> int:
    """Return the fastest count up to `cores`; `cores` itself unless another is clearly faster."""
    usual = speeds.get(cores)
    others = {count: speed for count, speed in speeds.items() if count < cores}
    best = max(others, key=lambda count: others[count], default=cores)
    return best if usual and best != cores and others[best] >= _GAIN_MIN * usual else cores


def known_speeds(
    measured: Mapping[int, ThreadSpeeds] | None, kind: Literal["decode", "prefill", "together"]
) -> Mapping[int, float]:
    found = ((count, getattr(speeds, kind)) for count, speeds in (measured or {}).items())
    return {count: speed for count, speed in found if speed}


AUTO: Final = "auto"
_MIB: Final = 1024**2

# Operations per second of a core of a server CPU of 2020 or later in prefill. SmolLM2-135M, Q4_1,
# f16 cache, build 10434: 165 tokens/s per core x 135 M weights x 2 = 45e9.
_CORE_FLOPS: Final = 40e9
_BATCH_S: Final = 0.5
_BATCH_MAX: Final = 2048
_UBATCH_MAX: Final = 512
_SLOTS: Final = 4
_MANY_SLOTS: Final = 8
_CTX_SLOT: Final = 8192
# A longer total context would only cost memory, because many slots serve short requests.
_CTX_TOTAL: Final = 65536
_CTX_SLOT_MIN: Final = 512
_CACHE_RAM_MAX_MIB: Final = 8192
# LLAMA_MAX_SEQ of llama.cpp is 256; builds may be compiled with more.
MOST: Final[Mapping[str, int]] = {"parallel": 1024}


@dataclass(frozen=True, slots=True)
class PlanInputs:
    gguf: Gguf
    machine: Machine
    device_bytes: int  # memory of all devices that layers can be offloaded to; 0 without a device
    instances: int  # processes that share the machine
    worker_bytes: int = 0  # memory of all RPC workers on other machines
    # Values that the daemon changed while it serves; they replace derived values.
    adapted: SettingsByFlag = field(default_factory=dict)
    measured: Mapping[int, ThreadSpeeds] | None = None  # by thread count; None: not to be measured
    ctx_each: int | None = None  # the configured context of each slot, in tokens
    draft: Gguf | None = None  # the draft model, or None
    spec_types: tuple[str, ...] = ()  # drafting types of the build
    saves_slots: bool = True  # whether slot files can replace cache-ram
    repacked_bytes: int = 0  # of the weights in the file that the CPU backend uses a copy of

    @property
    def cores(self) -> int:
        return max(1, self.machine.decode_cores // self.instances)

    @property
    def untried_threads(self) -> int | None:
        """The thread count that the next run should measure; None on devices."""
        if self.measured is None or self.device_bytes:
            return None
        return next_untried(self.measured, self.cores)

    @property
    def share_bytes(self) -> int:
        """Memory that an instance may use beside the weights.

        The instances share nine tenths of a device, or three quarters of main memory, less the
        weights, which instances of a model map together. At least an eighth of the memory counts,
        so that there is always a plan.
        """
        if not (self.worker_bytes or self.device_bytes):
            return self.memory_share_bytes
        room_bytes = self.worker_bytes or self.device_bytes
        share_bytes = max(room_bytes * 9 // 10 - self.gguf.tensor_bytes, room_bytes // 8)
        return share_bytes // (1 if self.worker_bytes else self.instances)  # a worker serves one

    @property
    def memory_share_bytes(self) -> int:
        """The share of an instance without devices and workers."""
        memory_bytes = self.machine.memory_bytes
        share_bytes = max(memory_bytes * 3 // 4 - self.gguf.tensor_bytes, memory_bytes // 8)
        return share_bytes // self.instances

    @property
    def kv_budget_bytes(self) -> int:
        """Limit of the KV cache: the whole share of a device, or half the share of main memory."""
        return self.share_bytes if self.device_bytes else self.share_bytes // 2


def slots(chosen: context.Chosen) -> int:
    return positive("parallel", chosen.get("parallel", _SLOTS))


def cache_count(chosen: context.Chosen) -> int:
    """Return the number of caches that share the context: one per slot, or 1 if unified."""
    return 1 if chosen.get("kv-unified") is True else slots(chosen)


def ctx_slot(chosen: context.Chosen) -> int:
    """Return the chosen context of a slot, in tokens; 0 for the model's own."""
    ctx = chosen.get("ctx-size", 0)
    return positive("ctx-size", ctx) // cache_count(chosen) if ctx else 0


def positive(key: str, value: FlagValue) -> int:
    """Return an option's value as a number; raises SettingsInvalid unless it is in range."""
    try:
        number = int(value)
    except (ValueError, OverflowError):  # a text; infinity
        number = 0
    most = MOST.get(key, context.NUMBER_MAX)
    if not 1 <= number <= most:
        raise SettingsInvalid(f"{key} = {value} is invalid", hint=f"use a number from 1 to {most}")
    return number


def _threads(inputs: PlanInputs, _chosen: context.Chosen) -> Setting:
    """Choose the threads that decode: the fastest count, or all cores if none was measured."""
    return _fastest(inputs, known_speeds(inputs.measured, "decode"), "one sequence")


def _threads_batch(inputs: PlanInputs, chosen: context.Chosen) -> Setting:
    """Choose threads for prompts and several sequences; these take longer if slots are many."""
    together = known_speeds(inputs.measured, "together")
    if slots(chosen) >= _MANY_SLOTS and together:
        return _fastest(inputs, together, "many sequences")
    return _fastest(inputs, known_speeds(inputs.measured, "prefill"), "prompts")


def _fastest(inputs: PlanInputs, speeds: Mapping[int, float], what: str) -> Setting:
    cores, untried = inputs.cores, inputs.untried_threads
    shared = count_of(inputs.machine.decode_cores, inputs.machine.decode_core_kind)
    shared += f" for {count_of(inputs.instances, 'instance')}"
    if untried:
        return Setting(untried, "machine", f"{shared}; speeds are measured at the first start")
    count = fastest_count(speeds, cores)
    if count == cores:
        return Setting(count, "machine", shared)
    reason = f"{what}: {speeds[count]:.0f} tokens/s, {speeds[cores]:.0f} with {cores} threads"
    return Setting(count, "machine", reason)


def _batch_size(inputs: PlanInputs, chosen: context.Chosen) -> Setting:
    """Choose the prompt tokens per batch, which determine the longest pause of running streams."""
    if inputs.device_bytes:
        size, reason = _BATCH_MAX, "a device processes this many tokens in well under a second"
    elif inputs.untried_threads:
        size, reason = _UBATCH_MAX, "the rate of prefill is measured at the first start"
    else:
        rate = _prompt_rate(inputs, chosen)
        tokens = 2 ** math.ceil(math.log2(max(1, rate * _BATCH_S)))
        size = min(_BATCH_MAX, max(32, tokens))
        reason = f"half a second to a second of prefill at {rate:.0f} tokens/s on this CPU"
    # A ubatch-size that is not set yet follows the batch size.
    ubatch = positive("ubatch-size", chosen.get("ubatch-size", 1))
    if ubatch > size:
        return Setting(ubatch, CORRAL, "a batch holds a whole ubatch-size")
    return Setting(size, "machine", reason)


def _prompt_rate(inputs: PlanInputs, chosen: context.Chosen) -> float:
    """Return prompt tokens per second on the CPU, measured or from two operations per weight."""
    threads = chosen.get("threads-batch")
    cores = threads if isinstance(threads, int) and threads > 0 else inputs.machine.decode_cores
    measured = known_speeds(inputs.measured, "prefill")
    if cores in measured:
        return measured[cores]
    return cores * _CORE_FLOPS / (2 * max(1, inputs.gguf.parameters))


def _ubatch_size(_inputs: PlanInputs, chosen: context.Chosen) -> Setting:
    batch = positive("batch-size", chosen.get("batch-size", _BATCH_MAX))
    return Setting(min(_UBATCH_MAX, batch), CORRAL, "at most the batch size and 512")


def _cache_type(inputs: PlanInputs, chosen: context.Chosen) -> Setting:
    gguf = inputs.gguf
    if not kv_cache.can_quantise(gguf):
        sizes = f"heads of {gguf.key_length} and {gguf.value_length} values"
        return Setting("f16", "gguf", f"{sizes} are not multiples of {kv_cache.BLOCK}")
    if inputs.device_bytes:
        return Setting("q8_0", "machine", "halves the cache at almost no cost on a device")
    ctx = ctx_slot(chosen) or inputs.ctx_each or _wanted_ctx(gguf, cache_count(chosen))
    in_f16 = {**chosen, "cache-type-k": "f16", "cache-type-v": "f16"}
    wanted = kv_cache.cache_bytes(gguf, cache_layout(in_f16, ctx))
    if wanted > inputs.kv_budget_bytes:
        reason = f"in f16 the cache would take {wanted // _MIB} MiB of this machine's memory"
        return Setting("q8_0", "machine", reason)
    return Setting("f16", "machine", "on a CPU q8_0 slows prefill, and memory suffices")


def _ctx_size(inputs: PlanInputs, chosen: context.Chosen) -> Setting:
    count = cache_count(chosen)
    if each := inputs.ctx_each:
        reason = f"max_context_length: {count_of(count, 'slot')}, {each} tokens per slot"
        return Setting(each * count, BATCHING, reason)
    if (per_slot := chosen.get("kv-unified-per-slot")) and count < slots(chosen):
        each = positive("kv-unified-per-slot", per_slot)
        reason = f"{count_of(slots(chosen), 'slot')} share the cache, {each} tokens per slot"
        return Setting(each * slots(chosen), CORRAL, reason)
    wanted = fitting = _wanted_ctx(inputs.gguf, count)
    while fitting > _CTX_SLOT_MIN and not _holds(inputs, chosen, fitting):
        fitting = max(_CTX_SLOT_MIN, fitting // 2)
    if fitting < wanted:
        reason, origin = f"{fitting} tokens per slot fit into memory", "machine"
    elif wanted == inputs.gguf.ctx_train:
        reason, origin = f"{wanted} tokens per slot, the model's training context", "gguf"
    else:
        reason, origin = f"{wanted} tokens per slot", CORRAL
    return Setting(fitting * count, origin, f"{count_of(count, 'slot')}, {reason}")


def _holds(inputs: PlanInputs, chosen: context.Chosen, ctx: int) -> bool:
    return context_bytes(inputs.gguf, chosen, cache_layout(chosen, ctx)) <= inputs.kv_budget_bytes


def context_bytes(gguf: Gguf, chosen: context.Chosen, cache: Cache) -> int:
    """Return the bytes that depend on the context: cache, and compute buffer of embeddings."""
    use = context.embedding(gguf, chosen)
    if use is None:
        return kv_cache.cache_bytes(gguf, cache)
    tokens, flash = use.micro_batch(cache.ctx), chosen.get("flash-attn") not in {"off", False}
    layout = context.ContextLayout(cache, tokens, tokens if gguf.is_causal else 0, flash)
    return kv_cache.cache_bytes(gguf, cache) + context.compute_bytes(gguf, layout)


def cache_layout(chosen: context.Chosen, ctx: int) -> Cache:
    ubatch = positive("ubatch-size", chosen.get("ubatch-size", _UBATCH_MAX))
    return context.cache_of(chosen, ctx, cache_count(chosen), slots(chosen), ubatch)


def _wanted_ctx(gguf: Gguf, count: int) -> int:
    shared = max(_CTX_SLOT_MIN, _CTX_TOTAL // count)
    return min(gguf.ctx_train or _CTX_SLOT, _CTX_SLOT, shared)


def _cache_ram(inputs: PlanInputs, chosen: context.Chosen) -> Setting:
    if inputs.saves_slots and has_draft_cache(chosen):
        reason = "with a draft model, an engine fails over a restored conversation in its cache-ram"
        return Setting(0, CORRAL, f"{reason}; slot files keep conversations")
    memory_mib, share_mib = inputs.machine.memory_bytes // _MIB, inputs.memory_share_bytes // _MIB
    reason = f"a quarter of one instance's share of {memory_mib} MiB memory"
    return Setting(min(_CACHE_RAM_MAX_MIB, share_mib // 4), "machine", reason)


def _load_mode(inputs: PlanInputs, chosen: context.Chosen) -> Setting:
    repacked, weights = inputs.repacked_bytes, inputs.gguf.tensor_bytes
    if repacked > weights // 2 and chosen.get("repack") is not False:
        sizes = f"{repacked // _MIB} of {weights // _MIB} MiB"
        return Setting("mmap", "machine", f"the engine repacks {sizes}; a lock would keep both")
    return Setting("mmap+mlock", CORRAL, "weights stay in memory, shared by all instances")


def _fit(inputs: PlanInputs, _chosen: context.Chosen) -> Setting:
    if inputs.device_bytes:
        return Setting("on", "machine", "the engine fits the model to its devices")
    reason = "without a device there is nothing to fit; the start is faster"
    return Setting("off", "machine", reason)


def _spec_type(inputs: PlanInputs, chosen: context.Chosen) -> Setting:
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


def count_of(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


# In the order of decision.
AUTO_VALUES: Final[Mapping[str, Callable[[PlanInputs, context.Chosen], Setting]]] = {
    "parallel": lambda *_: Setting(_SLOTS, CORRAL, "enough for a few conversations at once"),
    "threads": _threads,
    "threads-batch": _threads_batch,
    "batch-size": _batch_size,
    "ubatch-size": _ubatch_size,
    "cache-type-k": _cache_type,
    "cache-type-v": _cache_type,
    "ctx-size": _ctx_size,
    "cache-ram": _cache_ram,
    "load-mode": _load_mode,
    "fit": _fit,
    "spec-type": _spec_type,
}


SLOTS: Final = "parallel"
CONTEXT: Final = "ctx-size"


def adapt_slots(derived: SettingsByFlag, inputs: PlanInputs) -> dict[str, Setting]:
    """Return the adapted slots and context in place of derived ones; {} if slots share a cache.

    If memory does not suffice, there are fewer slots, but never shorter contexts: a conversation
    that fits into a slot must fit into a slot of the next instance.
    """
    adapted, chosen = inputs.adapted[SLOTS], values(derived)
    each, before = ctx_slot(chosen), slots(chosen)
    wanted = positive(SLOTS, adapted.value)
    if cache_count(chosen) != before:
        return {}
    count = wanted
    while count > before and not _holds(inputs, {**chosen, SLOTS: count}, each):
        count = max(before, count // 2)
    if count == before:
        return {}
    if count < wanted:
        adapted = replace(adapted, value=count, reason=f"{adapted.reason}; memory holds {count}")
    reason = f"{count} slots, {each} tokens per slot as with {before} slots"
    return {SLOTS: adapted, CONTEXT: Setting(each * count, adapted.origin, reason)}
