"""Shows the progress of downloads: bars on a terminal, otherwise lines for people or programs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Self, TextIO

from supervisor.output import ProgressMeter, printable, size, to_json, write

if TYPE_CHECKING:
    from rich.progress import Progress, Task, TaskID


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
