"""A command's outcome, shown: text for people, one JSON envelope for scripts.

stdout carries the data and nothing else; notes, progress and errors go to stderr. The envelope has
the same keys whether a command worked, failed, or failed before it ran:

    {"schema": 1, "command": "status", "status": "ok", "exit_code": 0,
     "data": …, "notes": […], "error": null | {"code", "message", "hint", "log"}}
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TextIO

from supervisor.errors import CorralError

SCHEMA: Final = 1
_EXIT_INTERRUPTED: Final = 130
_EXIT_PIPE_CLOSED: Final = 141
_STYLES: Final = {"red": "31", "green": "32", "yellow": "33", "dim": "2", "bold": "1"}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command found or did.

    Attributes:
        data: What `--json` prints: dicts, lists and plain values.
        text: What a person reads; no final newline. Empty prints nothing.
        notes: Remarks for stderr, one line each.
        exit_code: 0, or a code of supervisor.errors where the outcome is no error to shout about.
    """

    data: object
    text: str = ""
    notes: tuple[str, ...] = ()
    exit_code: int = 0


def finish(command: str, call: Callable[[], Outcome], *, as_json: bool) -> int:
    """Run a command, show its outcome or its error, and return the exit code.

    This is the CLI's one door: every CorralError ends here.
    """
    try:
        return _finish(command, call, as_json=as_json)
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has enough (`corral logs | head`). Python flushes once more at
        # exit, which must find something that takes it. Source: Python docs, "Note on SIGPIPE".
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_PIPE_CLOSED


def _finish(command: str, call: Callable[[], Outcome], *, as_json: bool) -> int:
    try:
        outcome = call()
    except CorralError as error:
        _show_error(command, error, as_json=as_json)
        return error.exit_code
    _show_outcome(command, outcome, as_json=as_json)
    sys.stdout.flush()
    return outcome.exit_code


def _show_outcome(command: str, outcome: Outcome, *, as_json: bool) -> None:
    if as_json:
        _print_envelope(command, outcome, None)
        return
    if outcome.text:
        print(outcome.text)
    for note in outcome.notes:
        print(paint(note, "yellow", sys.stderr), file=sys.stderr)


def _show_error(command: str, error: CorralError, *, as_json: bool) -> None:
    if as_json:
        _print_envelope(command, Outcome(None, exit_code=error.exit_code), error)
    else:
        print(describe(error, sys.stderr), file=sys.stderr)


def describe(error: CorralError, stream: TextIO) -> str:
    """Return an error as a person reads it: what happened, what to do, where to look."""
    lines = [f"{paint('error:', 'red', stream)} {error.message}"]
    if error.hint:
        lines.append(f"{paint(' hint:', 'yellow', stream)} {error.hint}")
    if error.log:
        lines.append(f"{paint('  log:', 'dim', stream)} {error.log}")
    return "\n".join(lines)


def _print_envelope(command: str, outcome: Outcome, error: CorralError | None) -> None:
    import orjson

    envelope = {
        "schema": SCHEMA,
        "command": command,
        "status": "error" if error or outcome.exit_code else "ok",
        "exit_code": outcome.exit_code,
        "data": outcome.data,
        "notes": outcome.notes,
        "error": error and error.as_json(),
    }
    print(orjson.dumps(envelope, option=orjson.OPT_INDENT_2, default=str).decode())


def wants_colour(stream: TextIO) -> bool:
    """Tell whether to colour a stream (NO_COLOR, FORCE_COLOR, TERM=dumb, or a terminal).

    Source: no-color.org; an empty NO_COLOR counts as unset.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def paint(text: str, style: str, stream: TextIO = sys.stdout) -> str:
    """Return text in a style of _STYLES where the stream takes colour."""
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if wants_colour(stream) else text


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return columns as wide as their widest cell; numbers (by look) stand to the right."""
    cells = [head, *rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    numeric = [bool(rows) and all(_looks_numeric(row[i]) for row in rows) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        aligned = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        return "  ".join(aligned).rstrip()

    return "\n".join([paint(line(head), "bold"), *map(line, rows)])


def _looks_numeric(cell: str) -> bool:
    return cell == "-" or cell[:1].isdigit()


def size(count_bytes: int | None) -> str:
    """Return bytes as people say them: 93.8 MiB; '-' for None."""
    if count_bytes is None:
        return "-"
    amount = float(count_bytes)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def duration(seconds: float | None) -> str:
    """Return a duration in its two largest units: 2d 3h, 4m 05s, 7s; '-' for None."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days}d {hours}h"
    if hours:
        return f"{hours}h {minutes:02d}m"
    return f"{minutes}m {whole % 60:02d}s" if minutes else f"{whole}s"


class Meter:
    """Progress on stderr: one redrawn line on a terminal, a line at each quarter elsewhere.

    Several things may progress at once; each has its own label.
    """

    def __init__(self, stream: TextIO = sys.stderr) -> None:
        self._stream = stream
        self._live = stream.isatty()
        self._shown: dict[str, int] = {}

    def show(self, label: str, fraction: float, detail: str = "") -> None:
        """Show that `label` is done to `fraction`, 0 to 1."""
        percent = int(fraction * 100)
        step = percent if self._live else percent // 25
        if self._shown.get(label) == step:
            return
        self._shown[label] = step
        line = f"{label} · {percent} %" + (f" · {detail}" if detail else "")
        self._stream.write(f"\r\x1b[2K{line}" if self._live else f"{line}\n")
        self._stream.flush()

    def clear(self) -> None:
        """Take the redrawn line away."""
        if self._live and self._shown:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
        self._shown.clear()
