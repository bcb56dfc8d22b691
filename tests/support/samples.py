"""Plain values for tests that plan: a machine, a model, an engine of any recorded build."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from supervisor.builds.discover import Device, Engine
from supervisor.builds.help import Flags, parse, recorded_builds
from supervisor.models.metadata import Gguf
from supervisor.system.machine import Machine

GIB = 1024**3
GPU = Device("Vulkan0", "a GPU", 24 * 1024)

_MACHINE = Machine(
    physical_cores=8,
    logical_cores=16,
    memory_bytes=32 * GIB,
    memory_available_bytes=24 * GIB,
    memlock_bytes=None,
    may_renice=True,
    cpu_flags=frozenset({"avx2"}),
)
_GGUF = Gguf(
    path=Path("/models/chat.gguf"),
    size_bytes=100_000_000,
    architecture="llama",
    name="Chat",
    parameters=135_000_000,
    layers=30,
    heads=9,
    kv_heads=(3,) * 30,
    key_length=64,
    value_length=64,
    embedding_length=576,
    ctx_train=8192,
    vocab_size=49152,
    tokenizer="gpt2",
    chat_template=None,
    quantisation="Q4_1",
    feed_forward=1536,
    experts=0,
    experts_used=0,
    sliding_window=None,
    sliding=(False,) * 30,
    recurrent=False,
    state_values=0,
    draft_layers=0,
    drafts_for=0,
    shards=1,
    tensor_bytes=96_000_000,
    token_bytes=96_000_000,
    embedding_bytes=30_000_000,
    output_bytes=0,
    matrix_bytes=(("Q4_1", 32, 66_000_000),),
    is_causal=True,
    pooling=None,
    tensors=(),
    fingerprint="0" * 32,
)


def machine(**changes: Any) -> Machine:
    """Return a machine of 8 cores, 32 GiB and every permission, but for the changes."""
    return replace(_MACHINE, **changes)


def model(**changes: Any) -> Gguf:
    """Return the facts of a small model, but for the changes."""
    if "kv_heads" in changes:
        changes = {"sliding": (False,) * len(changes["kv_heads"])} | changes
    made = replace(_GGUF, **changes)
    return made if made.tensors else replace(made, tensors=tuple(_tensors(made)))


def _tensors(made: Gguf) -> Iterator[tuple[str, int]]:
    """Yield the ends of a model, and one tensor for each of its equal layers."""
    yield "token_embd.weight", made.embedding_bytes
    yield "output.weight", made.output_bytes
    each = (made.tensor_bytes - made.embedding_bytes - made.output_bytes) // max(1, made.layers)
    yield from ((f"blk.{layer}.ffn_up.weight", each) for layer in range(made.layers))


def flags(build: str) -> Flags:
    """Return the options of a recorded build, such as `b10434`."""
    return parse(recorded_builds()[build].read_text("utf-8"))


def engine(build: str = "b10434", *devices: Device, **changes: Any) -> Engine:
    """Return an engine of a recorded build with these devices."""
    made = Engine(
        path=Path("/opt/llama-server"),
        version=build,
        build=int(build[1:]),
        source="setting",
        library_dirs=(),
        devices=devices,
        flags=flags(build),
    )
    return replace(made, **changes)
