"""What memory is taken for, and of which kinds it is: the words of memory.py."""

from __future__ import annotations

from dataclasses import dataclass, fields

from supervisor.engines.discover import Engine
from supervisor.gguf.metadata import Gguf
from supervisor.memory.context import Chosen, layout
from supervisor.memory.kv_cache import Cache


@dataclass(frozen=True, slots=True)
class MemoryBreakdown:
    """Bytes of one memory, by what they are for. See the head of memory.py."""

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
        """Return all of it."""
        return sum(getattr(self, field.name) for field in fields(self))

    @property
    def at_start(self) -> int:
        """Return what is taken before the first request."""
        return self.total - self.prompt_cache - self.checkpoints


@dataclass(frozen=True, slots=True)
class MemoryInputs:
    """What memory is taken for.

    Attributes:
        gguf: The model.
        chosen: Every option that the build takes, by today's name.
        engine: What runs it.
        cpu_flags: The CPU's features as Linux names them.
        draft: Its draft model, or None.
        projector_bytes: Size of its projector's file; 0 without one.
    """

    gguf: Gguf
    chosen: Chosen
    engine: Engine
    cpu_flags: frozenset[str] = frozenset()
    draft: Gguf | None = None
    projector_bytes: int = 0

    @property
    def cache(self) -> Cache:
        """Return the shape of its KV cache."""
        return layout(self.gguf, self.chosen, self.engine).cache
