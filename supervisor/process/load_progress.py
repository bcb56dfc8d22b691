"""The reports that llama-server writes to stdout as a child of its own router mode.

With `LLAMA_SERVER_ROUTER_PORT` set and stdin a pipe it writes lines

    cmd_child_to_router:state:{"state":"loading","payload":{"stages":["text_model"],
                               "current":"text_model","value":0.47}}

and one of state `ready` when it starts to listen. All other output is log. This is an internal
interface of llama.cpp: it is used where a build has it, and nothing depends on it.

Source: tools/server/server-models.cpp of llama.cpp; seen on builds 10434 and 11434.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from supervisor.process.log_file import LineSplitter

ROUTER_ENV: Final = "LLAMA_SERVER_ROUTER_PORT"
EXIT_LINE: Final = b"cmd_router_to_child:exit\n"
_PREFIX: Final = b"cmd_child_to_router:state:"
# The ready report of build 10434 has 300 bytes plus the model's name and aliases twice.
_LINE_MAX_BYTES: Final = 256 * 1024


@dataclass(frozen=True, slots=True)
class Progress:
    """Load progress.

    Attributes:
        stage: In llama.cpp's words, such as `text_model`.
        value: The share of all stages that is done, 0 to 1.
    """

    stage: str
    value: float


@dataclass(frozen=True, slots=True)
class Report:
    """One report; its state is `loading`, `ready`, `sleeping`, or one of a later build."""

    state: str
    progress: Progress | None = None


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
    return Report(state, _read_progress(report.get("payload")) if state == "loading" else None)


def _read_progress(payload: object) -> Progress | None:
    match payload:
        case {"stages": [*stages], "current": str(stage), "value": int() | float() as value}:
            before = stages.index(stage) if stage in stages else 0
            share = (before + min(max(value, 0), 1)) / max(1, len(stages))
            return Progress(stage, share)
        case _:
            return None
