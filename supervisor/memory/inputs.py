"""Input and output types of the memory estimate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Final

from supervisor.engines.discover import Engine
from supervisor.gguf.metadata import Gguf
from supervisor.memory.context import Chosen, context_layout
from supervisor.memory.kv_cache import Cache

_MIB: Final = 1024**2


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """Bytes of one memory by purpose; see the head of estimate.py."""

    weights: int = 0
    copies: int = 0
    kv: int = 0
    compute: int = 0
    output: int = 0
    prompt_cache: int = 0
    checkpoints: int = 0
    draft: int = 0
    projector: int = 0
    base: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def at_start(self) -> int:
        """Memory taken before the first request."""
        return self.total - self.prompt_cache - self.checkpoints


@dataclass(frozen=True, slots=True)
class WorkerMemory:
    """Memory that an instance takes of one RPC worker."""

    taken: MemoryBreakdown
    has_bytes: int
    free_bytes: int | None  # when it was last asked; None if it did not say
    is_main_memory: bool  # whether it is this machine's main memory


@dataclass(frozen=True, slots=True)
class MemoryInputs:
    """What the memory of an instance depends on."""

    gguf: Gguf
    chosen: Chosen  # every option that the build accepts, by today's name
    engine: Engine
    cpu_flags: frozenset[str] = frozenset()  # the CPU's features as Linux names them
    draft: Gguf | None = None  # the draft model, or None
    projector_bytes: int = 0  # sizes of the files of its projector and adapters

    @property
    def cache(self) -> Cache:
        return context_layout(self.gguf, self.chosen, self.engine).cache


def with_free(memory_inputs: MemoryInputs, free: Mapping[str, int]) -> MemoryInputs:
    """Note the free bytes of the devices of this machine that are known."""
    engine = memory_inputs.engine
    devices = tuple(
        replace(one, free_mib=free[one.name] // _MIB) if one.name in free else one
        for one in engine.devices
    )
    return replace(memory_inputs, engine=replace(engine, devices=devices))
