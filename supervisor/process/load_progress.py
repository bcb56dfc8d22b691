"""Reads what llama-server reports on stdout when it is run as a child of its own router.

With `LLAMA_SERVER_ROUTER_PORT` set and stdin a pipe it writes lines

    cmd_child_to_router:state:{"state":"loading","payload":{"stages":["text_model"],
                               "current":"text_model","value":0.47}}

and then one of state `ready` at the moment it starts to listen. Whatever else comes on stdout is
log. This is an interface of llama.cpp with itself: it is used where it shows up, and nothing
depends on it.

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
# The ready report of build 10434 has 300 bytes and the model's name and aliases twice.
_LINE_MAX_BYTES: Final = 256 * 1024


@dataclass(frozen=True, slots=True)
class Progress:
    """How far loading has come.

    Attributes:
        stage: The part being loaded, in llama.cpp's words, such as `text_model`.
        value: Share of all stages that is done, 0 to 1.
    """

    stage: str
    value: float


@dataclass(frozen=True, slots=True)
class Report:
    """One report of the engine.

    Attributes:
        state: `loading`, `ready`, `sleeping`, or a word we do not know yet.
        progress: How far loading has come; None outside of it.
    """

    state: str
    progress: Progress | None = None


class ReportReader:
    """Takes stdout apart into reports and log."""

    def __init__(self) -> None:
        self._lines = LineSplitter(_LINE_MAX_BYTES)

    def feed(self, chunk: bytes) -> tuple[list[Report], bytes]:
        """Return the reports that `chunk` completes, and every other whole line as log."""
        reports, log = [], bytearray()
        for line in self._lines.feed(chunk):
            if report := read_report(line):
                reports.append(report)
            else:
                log += line + b"\n"
        return reports, bytes(log)


def read_report(line: bytes) -> Report | None:
    """Return the report that a line of stdout is, or None when it is no report."""
    if not line.startswith(_PREFIX):
        return None
    try:
        told = json.loads(line.removeprefix(_PREFIX))
    except ValueError:
        return None
    if not isinstance(told, dict) or not isinstance(state := told.get("state"), str):
        return None
    return Report(state, _read_progress(told.get("payload")) if state == "loading" else None)


def _read_progress(payload: object) -> Progress | None:
    match payload:
        case {"stages": [*stages], "current": str(stage), "value": int() | float() as value}:
            before = stages.index(stage) if stage in stages else 0
            share = (before + min(max(value, 0), 1)) / max(1, len(stages))
            return Progress(stage, share)
        case _:
            return None
