"""What one run of an engine needs, and its environment. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from supervisor.engine_client.endpoint import Endpoint
from supervisor.host.spawn_options import LIBRARY_PATHS, library_path
from supervisor.process.load_progress import ROUTER_ENV
from supervisor.warmup.prompts import WarmPrompt

PROCESS_TAG_ENV: Final = "LLAMA_CORRAL_ENGINE"
KEY_ENV: Final = "LLAMA_API_KEY"

# Every option of llama-server is also an LLAMA_ARG_* variable, and others change its behaviour too:
# only these names are passed on. The prefixes configure drivers, GPU runtimes and thread libraries.
_NAMES: Final = frozenset(
    {"HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER", *LIBRARY_PATHS}
)
_PREFIXES: Final = (
    "AMD_", "CUDA_", "GGML_", "GOMP_", "GPU_", "HIP_", "HSA_", "KMP_", "LC_", "MESA_", "NVIDIA_",
    "OMP_", "ONEAPI_", "ROCM_", "ROCR_", "SYCL_", "VK_", "XDG_", "ZE_",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ProcessTag:
    """A variable in the environment of each engine, by which an orphan is recognised."""

    runtime: Path  # the runtime directory of its daemon
    instance: str
    program: Path  # the first word of its command line

    @property
    def text(self) -> str:
        """The value of PROCESS_TAG_ENV."""
        return "\n".join((str(self.runtime), self.instance, str(self.program)))

    @classmethod
    def read(cls, text: str) -> ProcessTag | None:
        match text.split("\n"):
            case [runtime, instance, program]:
                return cls(Path(runtime), instance, Path(program))
            case _:
                return None


@dataclass(frozen=True, slots=True)
class Launch:
    """What one run needs.

    Attributes:
        argv: The command line; starts with the engine's absolute path.
        env: The complete environment.
        prompts: To prefill, in this order.
        has_prompt_cache: Whether the engine keeps a prompt in main memory when its slot is reused.
        surroundings: What is open from before the spawn until after the exit.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(repr=False)
    cwd: Path
    endpoint: Endpoint
    api_key: str = field(repr=False)
    log_path: Path
    prompts: tuple[WarmPrompt, ...] = ()
    has_prompt_cache: bool = False
    surroundings: Callable[[], AbstractAsyncContextManager[None]] = nullcontext


def clean_environment(
    environ: Mapping[str, str],
    *,
    program: Path,
    library_dirs: Iterable[Path],
    api_key: str,
    marker: str,
) -> dict[str, str]:
    """Return the environment of an engine; `marker` is a `ProcessTag.text`.

    The key is passed here because other users can read a command line, but not an environment.
    """
    env = {name: value for name, value in environ.items() if _is_harmless(name)}
    return env | {
        **library_path(env, program, library_dirs),
        KEY_ENV: api_key,
        PROCESS_TAG_ENV: marker,
        ROUTER_ENV: "1",
        # Otherwise an abort starts a debugger for its backtrace, which takes a second.
        "GGML_NO_BACKTRACE": "1",
    }


def _is_harmless(name: str) -> bool:
    return name in _NAMES or name.startswith(_PREFIXES)
