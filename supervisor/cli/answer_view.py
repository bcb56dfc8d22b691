"""Shows an answer on a terminal while it arrives: its Markdown rendered, thoughts dim.

Blocks of Markdown that are complete are printed once, and stay. Only the last one, which may still
change, is drawn again.
"""

from __future__ import annotations

import re
import sys
import termios
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Final, Literal, Self

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment, Segments
from rich.text import Text

from supervisor.cli.chat import Piece
from supervisor.output import printable, wants_colour

_REFRESHES_PER_S: Final = 8
_JOINER: Final = "\u200d"  # joins emoji
_SPACE: Final = re.compile(r"[^\S\n\t]")


def plain(text: str) -> str:
    """Return text without control characters, for a terminal; any space becomes a plain space."""
    return _JOINER.join(map(printable, _SPACE.sub(" ", text).split(_JOINER)))


def split_blocks(text: str) -> list[str]:
    """Split Markdown into its blocks, of which the last may still grow."""
    starts = [
        token.map[0]
        for token in Markdown(text).parsed
        if token.map and token.level == 0 and token.nesting >= 0
    ]
    lines = text.split("\n")
    return ["\n".join(lines[i:j]) for i, j in pairwise([0, *starts[1:], len(lines)])]


def _markdown(text: str) -> Markdown:
    """Render Markdown in the terminal's own colours; HTML is shown as text, and not left out."""
    page = Markdown(text, code_theme="ansi_dark", hyperlinks=False)
    for token in page.parsed:
        if token.type == "html_block":
            token.type = "code_block"
        for child in token.children or ():
            if child.type == "html_inline":
                child.type = "text"
    return page


@contextmanager
def _without_echo() -> Iterator[None]:
    """Hide the text that is typed in the block; the next input line gets it."""
    if not sys.stdin.isatty():
        yield
        return
    file = sys.stdin.fileno()
    settings = termios.tcgetattr(file)
    silent = [*settings]
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(file, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, settings)


class _Tail:
    """The last lines of a text, as many as the terminal shows."""

    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._content, options.update(height=None), pad=False)
        for line in lines[-max(1, console.height - 1) :]:
            yield from line
            yield Segment.line()


class AnswerView:
    """Shows the pieces of one answer within the block."""

    def __init__(self) -> None:
        colour = wants_colour(sys.stdout)
        self._console = Console(no_color=not colour, highlight=False, legacy_windows=False)
        self._live = Live(
            _Tail(Text("…", "dim")),
            console=self._console,
            refresh_per_second=_REFRESHES_PER_S,
            transient=True,
            redirect_stderr=False,
            redirect_stdout=False,
        )
        self._kind: Literal["text", "thought"] = "text"
        self._pending = ""
        self._is_first = True
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._open.enter_context(_without_echo())
        self._open.enter_context(self._live)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()
        self._print(self._blocks())

    def add(self, piece: Piece) -> None:
        if piece.kind == "progress":
            self._live.update(_Tail(Text(piece.text, "dim")))
            return
        if piece.kind != self._kind:
            self._print(self._blocks())
            self._kind, self._pending = piece.kind, ""
        self._pending += plain(piece.text)
        if "\n" in piece.text:
            *done, self._pending = self._blocks()
            self._print(done)
        self._live.update(_Tail(self._rendered(self._shortened())))

    def _blocks(self) -> list[str]:
        return split_blocks(self._pending) if self._kind == "text" else self._pending.split("\n\n")

    def _shortened(self) -> str:
        """Return the part to draw again: the end of a long block of code."""
        lines, height = self._pending.split("\n"), self._console.height
        if len(lines) <= height or not lines[0].startswith("```"):
            return self._pending
        return "\n".join([lines[0], *lines[-height:]])

    def _print(self, blocks: Iterable[str]) -> None:
        """Print blocks with an empty line between two."""
        for block in blocks:
            text = self._console.render_lines(self._rendered(block.strip("\n")), pad=False)
            is_empty = [not "".join(segment.text for segment in line).strip() for line in text]
            if all(is_empty):
                continue
            first, last = is_empty.index(False), is_empty[::-1].index(False)
            for line in [*([] if self._is_first else [[]]), *text[first : len(text) - last]]:
                self._console.print(Segments([*line, Segment.line()]), end="")
            self._is_first = False

    def _rendered(self, text: str) -> RenderableType:
        return Text(text, "dim") if self._kind == "thought" else _markdown(text)
