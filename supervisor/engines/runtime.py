"""What an engine is as a runtime of models: the format it reads, and what it can do. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from supervisor.engines.discover import Engine


@dataclass(frozen=True, slots=True)
class RuntimeMetadata:
    """An engine; `version` is None and nothing is supported where it does not run."""

    format: str
    runtime_name: str
    version: str | None
    supports_gpu: bool
    supports_streaming: bool


def runtime_metadata(engine: Engine | None) -> RuntimeMetadata:
    return RuntimeMetadata(
        format="gguf",
        runtime_name="llama.cpp (llama-server)",
        version=engine.version if engine else None,
        # It may be compiled for GPUs; it can use those that it lists.
        supports_gpu=bool(engine and engine.devices),
        supports_streaming=engine is not None,
    )
