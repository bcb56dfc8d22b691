"""The logs of a report: of the daemon and of the engines, without prompts unless asked for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.host.files import open_regular
from supervisor.host.paths import Directories
from supervisor.process.log_file import LINE_MAX_BYTES, LineSplitter
from supervisor.report.engine_log import without_prompts
from supervisor.report.event_log import without_texts
from supervisor.report.part import Part

_BLOCK_BYTES: Final = 1024**2
# As large as a log becomes before the next one begins.
_FILE_MAX_BYTES: Final = 17 * 1024**2
_ENGINE_LINES_MAX: Final = 3000
_DAEMON_LINES_MAX: Final = 5000
_FILES_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class FoundLogs:
    """`is_verbose`: whether an engine wrote more than usual, and so what clients sent."""

    parts: tuple[Part, ...]
    is_verbose: bool


def read_logs(where: Directories, *, with_prompts: bool) -> FoundLogs:
    parts, is_verbose = [], False
    for path in list(where.engine_logs().values())[:_FILES_MAX]:
        name = f"logs/{path.name}"
        if with_prompts:
            parts.append(_part(name, _lines(path), _ENGINE_LINES_MAX))
            continue
        found = without_prompts(_lines(path))
        is_verbose = is_verbose or found.is_verbose
        parts.append(_part(name, found.lines, _ENGINE_LINES_MAX, found.left_out))
    daemon = _lines(where.daemon_log)
    if with_prompts:
        parts.append(_part("logs/daemon.jsonl", daemon, _DAEMON_LINES_MAX))
    else:
        events = without_texts(daemon, has_quotes=is_verbose)
        lines, left_out = events.lines, events.left_out
        parts.append(_part("logs/daemon.jsonl", lines, _DAEMON_LINES_MAX, left_out))
    return FoundLogs(tuple(parts), is_verbose)


def _part(name: str, lines: Iterable[str], most: int, left_out: int = 0) -> Part:
    kept = list(lines)[-most:]
    noun = "line that may hold" if left_out == 1 else "lines that may hold"
    note = f"{left_out} {noun} a prompt or an answer" if left_out else None
    return Part(name, "\n".join([*kept, ""]), note)


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a log; none of one that cannot be read."""
    splitter = LineSplitter(LINE_MAX_BYTES)
    try:
        with open_regular(path) as file:
            left_bytes = _FILE_MAX_BYTES
            while left_bytes > 0 and (block := file.read(min(_BLOCK_BYTES, left_bytes))):
                left_bytes -= len(block)
                for line in splitter.feed(block):
                    yield line.rstrip(b"\r").decode(errors="replace")
    except OSError:
        return
