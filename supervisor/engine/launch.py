"""The launch of one run of an engine, its environment, and its progress reports on stdout.

As a child of its own router mode (`LLAMA_SERVER_ROUTER_PORT` is set and stdin is a pipe)
llama-server writes lines to stdout such as

    cmd_child_to_router:state:{"state":"loading","payload":{"stages":["text_model"],
                               "current":"text_model","value":0.47}}

and a line of state `ready` when it starts to listen. All other output is log. This is an internal
interface of llama.cpp: it is used if the build has it, and nothing depends on it.

Source: tools/server/server-models.cpp of llama.cpp; seen on builds 10434 and 11434.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from supervisor.builds.probe import LIBRARY_PATHS, library_path
from supervisor.engine.child import Command
from supervisor.engine.client import Endpoint
from supervisor.engine.log_file import LineSplitter
from supervisor.engine.prompts import WarmPrompt

ROUTER_ENV: Final = "LLAMA_SERVER_ROUTER_PORT"
EXIT_LINE: Final = b"cmd_router_to_child:exit\n"
_PREFIX: Final = b"cmd_child_to_router:state:"
# The ready report of build 10434 has 300 bytes plus the model's name and aliases twice.
_LINE_MAX_BYTES: Final = 256 * 1024


# A stage of loading in llama.cpp's words, such as `text_model`, and the finished share of all
# stages, 0 to 1.
Progress = tuple[str, float]


# The state of a progress report: `loading`, `ready`, `sleeping`, or that of a later build.
Report = tuple[str, Progress | None]


class ReportReader:
    def __init__(self) -> None:
        self._lines = LineSplitter(_LINE_MAX_BYTES)

    def feed(self, chunk: bytes) -> tuple[list[Report], bytes]:
        """Return the reports that `chunk` completes, and all other complete lines as log."""
        reports, log = [], bytearray()
        for line in self._lines.feed(chunk):
            if report := read_report(line):
                reports.append(report)
            else:
                log += line + b"\n"
        return reports, bytes(log)


def read_report(line: bytes) -> Report | None:
    if not line.startswith(_PREFIX):
        return None
    try:
        report = json.loads(line.removeprefix(_PREFIX))
    except ValueError:
        return None
    if not isinstance(report, dict) or not isinstance(state := report.get("state"), str):
        return None
    return state, _read_progress(report.get("payload")) if state == "loading" else None


def _read_progress(payload: object) -> Progress | None:
    match payload:
        case {"stages": [*stages], "current": str(stage), "value": int() | float() as value}:
            before = stages.index(stage) if stage in stages else 0
            share = (before + min(max(value, 0), 1)) / max(1, len(stages))
            return stage, share
        case _:
            return None


PROCESS_TAG_ENV: Final = "LLAMA_CORRAL_ENGINE"
KEY_ENV: Final = "LLAMA_API_KEY"

# Every option of llama-server is also an LLAMA_ARG_* variable, and other variables change its
# behaviour too, so only these are passed on. The prefixes configure drivers, GPU runtimes and
# thread libraries.
_NAMES: Final = frozenset(
    {"HOME", "LANG", "LOGNAME", "PATH", "SHELL", "TMPDIR", "TZ", "USER", *LIBRARY_PATHS}
)
_PREFIXES: Final = (
    "AMD_", "CUDA_", "GGML_", "GOMP_", "GPU_", "HIP_", "HSA_", "KMP_", "LC_", "MESA_", "NVIDIA_",
    "OMP_", "ONEAPI_", "ROCM_", "ROCR_", "SYCL_", "VK_", "XDG_", "ZE_",
)  # fmt: skip


def process_tag(runtime: Path, instance: str, program: Path | str) -> str:
    """Return the variables that identify an orphan in its environment.

    It is the runtime directory of its daemon, its instance, and the first word of its command line.
    """
    return f"{runtime}\n{instance}\n{program}"


@dataclass(frozen=True, slots=True)
class Launch(Command):
    """The arguments of one run."""

    endpoint: Endpoint
    api_key: str = field(repr=False)
    log_path: Path
    prompts: tuple[WarmPrompt, ...] = ()  # prompts to prefill, in this order
    # Whether the engine keeps a prompt in main memory when its slot is reused.
    has_prompt_cache: bool = False
    uses_workers: bool = False  # whether RPC workers compute some of its layers
    # A context that is open from before the spawn until after the exit.
    surroundings: Callable[[], AbstractAsyncContextManager[None]] = nullcontext


def clean_environment(
    environ: Mapping[str, str],
    *,
    program: Path,
    library_dirs: Iterable[Path],
    api_key: str,
    marker: str,
) -> dict[str, str]:
    """Return an engine's environment, which has the key: other users can read a command line."""
    env = {
        name: value
        for name, value in environ.items()
        if name in _NAMES or name.startswith(_PREFIXES)
    }
    return env | {
        **library_path(env, program, library_dirs),
        KEY_ENV: api_key,
        PROCESS_TAG_ENV: marker,
        ROUTER_ENV: "1",
        # Otherwise an abort starts a debugger for its backtrace, which takes a second.
        "GGML_NO_BACKTRACE": "1",
    }
