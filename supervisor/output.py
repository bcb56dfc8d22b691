"""A command's outcome, shown: text for people, one JSON envelope for scripts.

stdout carries the data and nothing else; notes, progress and errors go to stderr. The envelope has
the same keys whether a command worked, failed, or failed before it ran:

    {"schema": 1, "command": "status", "status": "ok", "exit_code": 0,
     "data": …, "notes": […], "error": null | {"code", "message", "hint", "log"}}

Names of models, words of clients and lines of logs come from strangers. Whatever goes to a terminal
goes through `write`, which makes everything visible that would command it.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TextIO

from supervisor.errors import CorralError

SCHEMA: Final = 1
_ONE_BYTE: Final = 0x100
_TWO_BYTES: Final = 0x10000
_EXIT_INTERRUPTED: Final = 130
_EXIT_PIPE_CLOSED: Final = 141
_STYLES: Final = {"red": "31", "green": "32", "yellow": "33", "dim": "2", "bold": "1"}
# Whatever is not plain ASCII is looked at; tabulators and newlines of logs and tables stay.
_SUSPECT: Final = re.compile(r"[^\x20-\x7e\t\n]")
# Stands for the escape character in our own styles until they are written. Random, so that no text
# of a stranger has it.
_OUR_ESCAPE: Final = f"\x1b{os.urandom(8).hex()}"


@dataclass(frozen=True, slots=True)
class CommandResult:
    """What a command found or did.

    Attributes:
        data: What `--json` prints: dicts, lists and plain values.
        text: What a person reads; no final newline. Empty prints nothing.
        notes: Remarks for stderr, one line each.
        exit_code: 0, or a code of supervisor.errors where the outcome is no error to shout about.
        is_raw: Whether the text goes out as it is, also what commands a terminal.
    """

    data: object
    text: str = ""
    notes: tuple[str, ...] = ()
    exit_code: int = 0
    is_raw: bool = False


def run_command(command: str, call: Callable[[], CommandResult], *, as_json: bool) -> int:
    """Run a command, show its outcome or its error, and return the exit code.

    Every CorralError of the CLI ends here.
    """
    try:
        return _finish(command, call, as_json=as_json)
    except KeyboardInterrupt:
        write("", sys.stderr)
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has enough (`corral logs | head`). Python flushes once more at
        # exit, which must find something that takes it. Source: Python docs, "Note on SIGPIPE".
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_PIPE_CLOSED


def _finish(command: str, call: Callable[[], CommandResult], *, as_json: bool) -> int:
    try:
        outcome = call()
    except CorralError as error:
        _show_error(command, error, as_json=as_json)
        return error.exit_code
    _show_outcome(command, outcome, as_json=as_json)
    sys.stdout.flush()
    return outcome.exit_code


def _show_outcome(command: str, outcome: CommandResult, *, as_json: bool) -> None:
    if as_json:
        _print_envelope(command, outcome, None)
        return
    if outcome.text:
        write(outcome.text, raw=outcome.is_raw)
    for note in outcome.notes:
        write(colored(note, "yellow", sys.stderr), sys.stderr)


def _show_error(command: str, error: CorralError, *, as_json: bool) -> None:
    if as_json:
        _print_envelope(command, CommandResult(None, exit_code=error.exit_code), error)
    else:
        write(describe(error, sys.stderr), sys.stderr)


@functools.cache
def warn(text: str) -> None:
    """Say on stderr, once, what a person should know whatever becomes of the command."""
    write(f"{colored('warning:', 'yellow', sys.stderr)} {text}", sys.stderr)


def write(text: str, stream: TextIO | None = None, *, end: str = "\n", raw: bool = False) -> None:
    """Write text to a terminal, a pipe or a file: stdout, where nothing else is said.

    This is the one place that does. What would command a terminal is made visible, our own styles
    aside; `raw` lets everything pass.
    """
    stream = stream or sys.stdout
    shown = text if raw else printable(text)
    shown = shown.replace(printable(_OUR_ESCAPE), "\x1b")
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(shown.encode(encoding, "backslashreplace").decode(encoding) + end)
    stream.flush()


def printable(text: str) -> str:
    r"""Return text with `\x1b` or `\u202e` for each character that is not for eyes.

    Those are controls, what is not seen or changes the direction of text, spaces but the plain one,
    halves of surrogate pairs, and what Unicode has not assigned.
    """
    return _SUSPECT.sub(_escape, text)


def one_line(text: str) -> str:
    """Return text as `printable` does, and in one line."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def _escape(found: re.Match[str]) -> str:
    if found[0].isprintable():
        return found[0]
    code = ord(found[0])
    if code < _ONE_BYTE:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < _TWO_BYTES else f"\\U{code:08x}"


def to_json(value: object, *, indent: bool = False) -> str:
    """Return JSON that a terminal may be shown; what orjson refuses is written by `json`.

    orjson refuses numbers of more than 64 bits, and paths that are not UTF-8.
    """
    import orjson

    try:
        option = orjson.OPT_INDENT_2 if indent else 0
        text = orjson.dumps(value, option=option, default=str).decode()
    except orjson.JSONEncodeError:
        text = json.dumps(value, indent=2 if indent else None, default=str)
    return _SUSPECT.sub(_escape_in_json, text)


def _escape_in_json(found: re.Match[str]) -> str:
    return found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1]


def describe(error: CorralError, stream: TextIO) -> str:
    """Return an error as a person reads it: what happened, what to do, where to look."""
    lines = [f"{colored('error:', 'red', stream)} {error.message}"]
    if error.hint:
        lines.append(f"{colored(' hint:', 'yellow', stream)} {error.hint}")
    if error.log:
        lines.append(f"{colored('  log:', 'dim', stream)} {error.log}")
    return "\n".join(lines)


def _print_envelope(command: str, outcome: CommandResult, error: CorralError | None) -> None:
    envelope = {
        "schema": SCHEMA,
        "command": command,
        "status": "error" if error or outcome.exit_code else "ok",
        "exit_code": outcome.exit_code,
        "data": outcome.data,
        "notes": outcome.notes,
        "error": error and error.as_json(),
    }
    write(to_json(envelope, indent=True))


def wants_colour(stream: TextIO) -> bool:
    """Tell whether to colour a stream (NO_COLOR, FORCE_COLOR, TERM=dumb, or a terminal).

    Source: no-color.org; an empty NO_COLOR counts as unset.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def colored(text: str, style: str, stream: TextIO = sys.stdout) -> str:
    """Return text in a style of _STYLES where the stream takes colour; for `write` to write."""
    if not wants_colour(stream):
        return text
    return f"{_OUR_ESCAPE}[{_STYLES[style]}m{text}{_OUR_ESCAPE}[0m"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return columns as wide as their widest cell; numbers (by look) stand to the right."""
    cells = [head, *([one_line(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    numeric = [bool(rows) and all(_looks_numeric(row[i]) for row in rows) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        aligned = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        return "  ".join(aligned).rstrip()

    return "\n".join([colored(line(head), "bold"), *map(line, cells[1:])])


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


class ProgressMeter:
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
        if self._live:
            write(f"\r\x1b[2K{printable(line)}", self._stream, end="", raw=True)
        else:
            write(line, self._stream)

    def clear(self) -> None:
        """Take the redrawn line away."""
        if self._live and self._shown:
            write("\r\x1b[2K", self._stream, end="", raw=True)
        self._shown.clear()
