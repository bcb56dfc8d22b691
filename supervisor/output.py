"""Shows the result of a command: text for people, one JSON envelope for scripts.

stdout carries only data; notes, progress and errors go to stderr. The envelope always has the same
keys:

    {"schema": 1, "command": "status", "status": "ok", "exit_code": 0,
     "data": …, "notes": […], "error": null | {"code", "message", "hint", "log"}}

Model names, client texts and log lines come from strangers: `write` makes control characters
visible in everything that goes to a terminal.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import TYPE_CHECKING, Final, Self, TextIO

from supervisor.errors import CorralError

if TYPE_CHECKING:
    from rich.progress import Progress, Task, TaskID

SCHEMA: Final = 1
_ONE_BYTE: Final = 0x100
_TWO_BYTES: Final = 0x10000
_BAR_CELLS: Final = 12
# Narrower text is hard to read: it begins on a new line, with this indent.
_TEXT_MIN: Final = 32
_INDENT: Final = 6
_EXIT_INTERRUPTED: Final = 130
_EXIT_PIPE_CLOSED: Final = 141
_STYLES: Final = {"red": "31", "green": "32", "yellow": "33", "dim": "2", "bold": "1"}
# Characters to check; tabs and newlines of logs and tables pass.
_SUSPECT: Final = re.compile(r"[^\x20-\x7e\t\n]")
# Marks our own styles until `write` replaces it by the escape character. Random, so that no other
# text contains it.
_OUR_ESCAPE: Final = f"\x1b{os.urandom(8).hex()}"


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The result of a command: `data` for --json, `text` for people (no final newline)."""

    data: object
    text: str = ""
    notes: tuple[str, ...] = ()  # lines for stderr
    exit_code: int = 0  # a code of supervisor.errors; not 0 if the text already describes a failure
    is_raw: bool = False  # write control characters of the text as they are


def json_lines(call: Callable[[], CommandResult]) -> CommandResult:
    """Run a command; its result shows as the last of its JSON lines, `result` or `error`."""
    try:
        result = call()
    except CorralError as error:
        return CommandResult(None, to_json({"error": error.as_json()}), exit_code=error.exit_code)
    return CommandResult(None, to_json({"result": result.data}), exit_code=result.exit_code)


def run_command(command: str, call: Callable[[], CommandResult], *, as_json: bool) -> int:
    """Run a command, show its result or its CorralError, and return the exit code."""
    try:
        return _finish(command, call, as_json=as_json)
    except KeyboardInterrupt:
        write("", sys.stderr)
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has closed the pipe (`corral logs | head`). Python flushes once more at exit,
        # which must not fail. Source: Python docs, "Note on SIGPIPE".
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _EXIT_PIPE_CLOSED


def _finish(command: str, call: Callable[[], CommandResult], *, as_json: bool) -> int:
    error = None
    try:
        result = call()
    except CorralError as caught:
        error, result = caught, CommandResult(None, exit_code=caught.exit_code)
    if as_json:
        _print_envelope(command, result, error)
    elif error:
        write(describe(error, sys.stderr), sys.stderr)
    else:
        if result.text:
            write(result.text, raw=result.is_raw)
        for note in result.notes:
            write(colored(note, "yellow", sys.stderr), sys.stderr)
    sys.stdout.flush()
    return result.exit_code


@functools.cache
def warn(text: str) -> None:
    """Show a warning on stderr, each text once."""
    write(f"{colored('warning:', 'yellow', sys.stderr)} {text}", sys.stderr)


def write(text: str, stream: TextIO | None = None, *, end: str = "\n", raw: bool = False) -> None:
    """Write text to stdout or another stream; the only place that does.

    Control characters are made visible, apart from our own styles, unless `raw`.
    """
    stream = stream or sys.stdout
    shown = text if raw else printable(text)
    shown = shown.replace(printable(_OUR_ESCAPE), "\x1b")
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(shown.encode(encoding, "backslashreplace").decode(encoding) + end)
    stream.flush()


def printable(text: str) -> str:
    r"""Replace characters that str.isprintable refuses by escapes such as `\x1b` and `\u202e`."""
    return _SUSPECT.sub(_escape, text)


def one_line(text: str) -> str:
    """As `printable`, with newlines and tabs escaped too."""
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def _escape(found: re.Match[str]) -> str:
    if found[0].isprintable():
        return found[0]
    code = ord(found[0])
    if code < _ONE_BYTE:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < _TWO_BYTES else f"\\U{code:08x}"


def to_json(value: object, *, indent: bool = False) -> str:
    """Serialise to JSON without control characters.

    `json` writes values that orjson refuses: numbers of more than 64 bits, paths that are not
        UTF-8.
    """
    import orjson

    try:
        option = orjson.OPT_INDENT_2 if indent else 0
        text = orjson.dumps(value, option=option, default=str).decode()
    except orjson.JSONEncodeError:
        text = json.dumps(value, indent=2 if indent else None, default=_members_or_text)

    def escape(found: re.Match[str]) -> str:
        return found[0] if found[0].isprintable() else json.dumps(found[0])[1:-1]

    return _SUSPECT.sub(escape, text)


def _members_or_text(value: object) -> object:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def describe(error: CorralError, stream: TextIO, kind: str = "error") -> str:
    lines = [f"{colored(f'{kind}:', 'red', stream)} {error.message}"]
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
    """Return whether to colour a stream (NO_COLOR, FORCE_COLOR, TERM=dumb, or a terminal).

    Source: no-color.org; an empty NO_COLOR counts as unset.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def colored(text: str, style: str, stream: TextIO = sys.stdout) -> str:
    if not wants_colour(stream):
        return text
    return f"{_OUR_ESCAPE}[{_STYLES[style]}m{text}{_OUR_ESCAPE}[0m"


def terminal_columns() -> int | None:
    """Return the width of the terminal that stdout is; None in a pipe: nothing is cut."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def hanging(prefix: str, text: str, columns: int | None) -> str:
    """Wrap text behind a prefix, or below it if the prefix is long. No word is broken."""
    if columns is None:
        return f"{prefix}{text}"
    is_behind = columns - len(prefix) >= _TEXT_MIN
    indent = len(prefix) if is_behind else _INDENT
    wrapper = textwrap.TextWrapper(
        max(columns - indent, _TEXT_MIN), break_long_words=False, break_on_hyphens=False
    )
    lines = [line for part in text.split("\n") for line in wrapper.wrap(part) or [""]]
    begin = [] if is_behind else [prefix.rstrip()]
    wrapped = f"\n{' ' * indent}".join([*begin, *lines])
    return prefix + wrapped if is_behind else wrapped


def fit(
    head: Sequence[str],
    rows: Sequence[Sequence[object]],
    columns: int | None,
    least: Sequence[str],
) -> tuple[list[str], list[list[str]]]:
    """Return the titles and cells of a table that a terminal has room for.

    `least`: titles in the order in which they are left out; others never are. If the table is still
    too wide, the cells of its last column are cut.
    """
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    kept = list(range(len(head)))
    if columns is None:
        return [*head], cells
    for title in least:
        if sum(widths[i] + 2 for i in kept) - 2 > columns:
            kept.remove(list(head).index(title))
    room = max(1, columns - sum(widths[i] + 2 for i in kept[:-1]))
    texts = [[row[i] for i in kept] for row in cells]
    for row in texts:
        row[-1] = row[-1] if len(row[-1]) <= room else f"{row[-1][: room - 1]}…"
    return [head[i] for i in kept], texts


def is_fitting(head: Sequence[str], rows: Sequence[Sequence[object]], columns: int | None) -> bool:
    return len(fit(head, rows, columns, head[:1])[0]) == len(head)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return aligned columns; None and an empty list are shown as `-`, other lists with commas."""
    cells = [head, *([_cell(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    numeric = [
        bool(rows) and all(row[i] == "-" or row[i][:1].isdigit() for row in cells[1:])
        for i in range(len(head))
    ]

    def line(row: Sequence[str]) -> str:
        aligned = (
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        )
        return "  ".join(aligned).rstrip()

    return "\n".join([colored(line(head), "bold"), *map(line, cells[1:])])


def _cell(value: object) -> str:
    if isinstance(value, list | tuple):
        value = ", ".join(map(str, value)) or None
    return "-" if value is None else one_line(str(value))


def size(count_bytes: int | None) -> str:
    """Format bytes as 93.8 MiB; '-' for None."""
    if count_bytes is None:
        return "-"
    amount = float(count_bytes)
    for unit in ("B", "KiB", "MiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} GiB"


def duration(seconds: float | None) -> str:
    """Format a duration in its two largest units: 2d 3h, 4m 05s, 7s; '-' for None."""
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
    """Shows progress on stderr within its block.

    One redrawn line on a terminal, otherwise a line per quarter. `as_json` writes each change as a
    line of JSON to stdout, for a program.
    """

    def __init__(self, stream: TextIO = sys.stderr, *, as_json: bool = False) -> None:
        self._stream = stream
        self._as_json = as_json
        self._live = stream.isatty() and not as_json
        self._shown: dict[str, tuple[int, str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def show(self, label: str, fraction: float, detail: str = "") -> None:
        percent = int(fraction * 100)
        is_whole = self._live or self._as_json
        step = (percent, detail) if is_whole else (percent // 25, "")
        if self._shown.get(label) == step:
            return
        self._shown[label] = step
        if self._as_json:
            write(to_json({"label": label, "share": fraction, "detail": detail}))
            return
        after = f"{percent} %" + (f" · {detail}" if detail else "")
        if self._live:
            done = min(_BAR_CELLS, max(0, int(fraction * _BAR_CELLS)))
            line = printable(f"{label} [{'#' * done}{'-' * (_BAR_CELLS - done)}] {after}")
            # A line that wraps would not be redrawn but repeated.
            line = line[: shutil.get_terminal_size().columns - 1]
            write(f"\r\x1b[2K{line}", self._stream, end="", raw=True)
        else:
            write(f"{label} · {after}", self._stream)

    def clear(self) -> None:
        if self._live and self._shown:
            write("\r\x1b[2K", self._stream, end="", raw=True)
        self._shown.clear()


class TransferMeter:
    """Shows progress by file on stderr. Names come from strangers, so they are escaped.

    `as_json` writes a line of JSON to stdout for each percent, for a program.
    """

    def __init__(self, stream: TextIO = sys.stderr, *, as_json: bool = False) -> None:
        self._stream = stream
        self._as_json = as_json
        self._shown: tuple[str, str, int] | None = None
        self._lines = ProgressMeter(stream)
        self._bars = _bars(stream) if stream.isatty() and not as_json else None
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars:
            self._bars.stop()

    def show(self, name: str, stage: str, done_bytes: int, all_bytes: int) -> None:
        if self._as_json:
            shown = (name, stage, 100 * done_bytes // max(1, all_bytes))
            if shown != self._shown:
                self._shown, sizes = shown, {"done_bytes": done_bytes, "all_bytes": all_bytes}
                write(to_json({"file": name, "stage": stage, **sizes}))
            return
        label = f"{name}: {stage}"
        if self._bars is None:
            fraction = done_bytes / all_bytes if all_bytes else 1.0
            self._lines.show(label, fraction, f"{size(done_bytes)} of {size(all_bytes)}")
            return
        if label not in self._tasks:
            # Bytes of an earlier run do not count in the rate.
            self._tasks[label] = self._bars.add_task(
                printable(label), total=all_bytes, completed=done_bytes
            )
        self._bars.update(self._tasks[label], completed=done_bytes)

    def note(self, text: str) -> None:
        """Show a sentence above the bars."""
        if self._as_json:
            write(to_json({"note": text}))
        elif self._bars:
            self._bars.console.print(printable(text), markup=False, highlight=False)
        else:
            write(text, self._stream)


def _bars(stream: TextIO) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.table import Column
    from rich.text import Text

    class Amount(ProgressColumn):
        """Renders `1.2 GiB of 4.6 GiB, 21.3 MiB/s`."""

        def render(self, task: Task) -> Text:
            rate = f", {size(int(task.speed))}/s" if task.speed else ""
            return Text(f"{size(int(task.completed))} of {size(int(task.total or 0))}{rate}")

    name = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    return Progress(
        TextColumn("{task.description}", markup=False, table_column=name),
        BarColumn(bar_width=24),
        Amount(),
        TimeRemainingColumn(compact=True),
        console=Console(file=stream),
        expand=True,
    )
