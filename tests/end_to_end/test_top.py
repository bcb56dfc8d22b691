"""`corral top` in a terminal, in a pipe, and without a daemon."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.corral_cli import CorralCli, begin_stream, rest_of, until
from support.terminal import Terminal


class Screen(Terminal):
    """The latest frame that `corral top` drew."""

    def lines(self) -> list[str]:
        self.read()
        frame = self.written.rpartition(b"\x1b[H")[2].decode(errors="replace")
        # The terminal's driver puts a carriage return before each newline.
        return re.split("\r+\n", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", frame))

    def shows(self, text: str) -> bool:
        return text in "\n".join(self.lines())

    def requests(self) -> list[str]:
        """The listed short ids of requests."""
        found = (re.match(r"[> ] ([0-9a-f]{8})\b", line) for line in self.lines()[:-2])
        return [entry[1] for entry in found if entry]

    def end(self) -> int:
        code = super().end()
        assert self.written.endswith(b"\x1b[?25h\x1b[?1049l")
        return code


@contextmanager
def top(corral: CorralCli, *words: str) -> Iterator[Screen]:
    with Screen(corral, "top", *words) as screen:
        until(lambda: screen.shows("q quit"))
        yield screen


def test_a_terminal_sorts_selects_and_cancels(corral: CorralCli, slow_model: Path) -> None:
    flags = "{ ctx-size = 8192, parallel = 2, threads = 1 }"
    corral.configure(f'[models.m]\npath = "{slow_model}"\nflags = {flags}\n')
    assert corral("top").returncode == 3
    corral.ok("start")
    with (
        begin_stream(corral, 30_000, "m") as one,
        begin_stream(corral, 30_000, "m") as other,
        top(corral, "--interval", "0.2") as screen,
    ):
        until(lambda: len(screen.requests()) == 2 and screen.shows("2/2"))
        first, second = screen.requests()
        screen.press("a")
        until(lambda: screen.requests() == [second, first])
        screen.resize(60, 12)
        until(lambda: len(screen.lines()) == 12 and max(map(len, screen.lines())) <= 60)
        screen.resize(120, 30)
        until(lambda: len(screen.lines()) == 30)
        screen.press("\x1b[Bx")
        until(lambda: screen.shows(f"cancel {second}") and screen.shows("y or n"))
        screen.press("n")
        until(lambda: screen.shows("not cancelled"))
        screen.press("xy")
        until(lambda: screen.shows(f"cancelled {second}") and screen.requests() == [first])
        assert "request_cancelled" in rest_of(other)
        assert first in frame_in_a_pipe(corral)
        screen.press("x")
        until(lambda: screen.shows(f"cancel {first}"))
        screen.press("y")
        assert "request_cancelled" in rest_of(one)
        until(lambda: screen.shows("no request is in flight"))
        corral.ok("stop")
        until(lambda: screen.shows("the daemon is not running"))
        corral.ok("start")
        until(lambda: screen.shows("the daemon was started again") and screen.shows("m.0"))
        screen.press("q")
        assert screen.end() == 0
    with top(corral) as screen:
        screen.process.send_signal(signal.SIGINT)
        assert screen.end() == 130


def frame_in_a_pipe(corral: CorralCli) -> str:
    text = corral.ok("top")
    assert "\x1b" not in text
    assert corral.data("top")["status"]["models"][0]["name"] == "m"
    return text
