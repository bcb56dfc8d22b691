"""All that one run of an engine needs, as a value, and the environment it gets. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from supervisor.engine_client.endpoint import Endpoint
from supervisor.process.load_progress import ROUTER_ENV
from supervisor.warmup.prompts import WarmPrompt

PROCESS_TAG_ENV: Final = "LLAMA_CORRAL_ENGINE"
KEY_ENV: Final = "LLAMA_API_KEY"

# Every option of llama-server is also an LLAMA_ARG_* variable, and LLAMA_API_KEY and others change
# what it does: only names listed here are passed on. The prefixes are those by which drivers, GPU
# runtimes and thread libraries are told what the machine's owner wants.
_NAMES: Final = frozenset(
    {"HOME", "LANG", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER"}
)
_PREFIXES: Final = (
    "AMD_", "CUDA_", "GGML_", "GOMP_", "GPU_", "HIP_", "HSA_", "KMP_", "LC_", "MESA_", "NVIDIA_",
    "OMP_", "ONEAPI_", "ROCM_", "ROCR_", "SYCL_", "VK_", "XDG_", "ZE_",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ProcessTag:
    """What every engine of ours carries in its environment, so that it can be told from others.

    Attributes:
        runtime: The runtime directory of the daemon it belongs to, which one daemon owns at a time.
        instance: The instance it is a run of.
        program: The program that was started, as its command line begins.
    """

    runtime: Path
    instance: str
    program: Path

    @property
    def text(self) -> str:
        """Return the value of MARKER_ENV: its parts, each on a line."""
        return "\n".join((str(self.runtime), self.instance, str(self.program)))

    @classmethod
    def read(cls, text: str) -> ProcessTag | None:
        """Return the marker that a text is, or None when it is none."""
        match text.split("\n"):
            case [runtime, instance, program]:
                return cls(Path(runtime), instance, Path(program))
            case _:
                return None


@dataclass(frozen=True, slots=True)
class Launch:
    """All that one run needs.

    Attributes:
        argv: The command line, the engine's absolute path first.
        env: The whole environment of the process.
        cwd: Its working directory, that of the engine.
        endpoint: Where it will listen.
        api_key: What it wants to be shown with each request.
        log_path: Where its output goes.
        prompts: What it reads ahead, in this order.
        has_prompt_cache: Whether the engine keeps a prompt in main memory when its slot is reused.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    cwd: Path
    endpoint: Endpoint
    api_key: str = field(repr=False)
    log_path: Path
    prompts: tuple[WarmPrompt, ...] = ()
    has_prompt_cache: bool = False


def clean_environment(
    environ: Mapping[str, str], *, library_dirs: Iterable[Path], api_key: str, marker: str
) -> dict[str, str]:
    """Return the environment an engine gets: little of ours, and what makes it a good child.

    Args:
        environ: Our own environment, of which a list of harmless names is passed on.
        library_dirs: Put before LD_LIBRARY_PATH, first one first.
        api_key: The key the engine asks of everybody. The environment of a process can be read by
            its own user only, a command line by all.
        marker: `Marker.text`, by which the process can be recognised as ours.
    """
    env = {name: value for name, value in environ.items() if _is_harmless(name)}
    libraries = [*map(str, library_dirs), *filter(None, [env.get("LD_LIBRARY_PATH")])]
    if libraries:
        env["LD_LIBRARY_PATH"] = ":".join(libraries)
    return env | {
        KEY_ENV: api_key,
        PROCESS_TAG_ENV: marker,
        ROUTER_ENV: "1",
        # An abort otherwise starts a debugger for its backtrace, which takes a second.
        "GGML_NO_BACKTRACE": "1",
    }


def _is_harmless(name: str) -> bool:
    return name in _NAMES or name.startswith(_PREFIXES)
