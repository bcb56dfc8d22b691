"""What Ollama's API needs of the supervisor."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ModelDetails:
    """What a model's file says.

    Attributes:
        architecture: As GGUF names it, such as `llama`.
        chat_template: Jinja; empty for none.
        capabilities: In Ollama's words.
    """

    architecture: str = ""
    chat_template: str = ""
    capabilities: tuple[str, ...] = ("completion",)


@dataclass(frozen=True, slots=True)
class Residence:
    """A loaded model.

    Attributes:
        memory_bytes: By estimate, in main memory and on GPUs.
        gpu_bytes: Of those, on GPUs.
        unload_in_s: Seconds until it is unloaded without requests; None for never.
    """

    memory_bytes: int = 0
    gpu_bytes: int = 0
    unload_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """A step of a download; `total_bytes` is 0 for one without a size."""

    status: str
    file: str = ""
    total_bytes: int = 0
    completed_bytes: int = 0


class OllamaHost(Protocol):
    """All names are those of configured models, but for `pull`."""

    async def details(self, models: Sequence[str], /) -> Mapping[str, ModelDetails]:
        """Return those of the models whose files can be read."""

    def residence(self, model: str, /) -> Residence:
        """Return that of a model, loaded or not."""

    def keep_alive(self, model: str, seconds: float, /) -> None:
        """Note how long a loaded model is to stay without requests."""

    def pull(self, name: str, /) -> AsyncGenerator[Progress, None]:
        """Download a model; cancelled with its iteration.

        Raises:
            ProxyError: No such model, no space, or the download failed.
        """

    async def delete(self, model: str, /) -> None:
        """Remove the files of a model.

        Raises:
            ProxyError: It cannot be removed.
        """
