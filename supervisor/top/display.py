"""The display: waits for samples, keys and signals, and shows what they change."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from supervisor.control.client import Client
from supervisor.top.frame import Size, screen
from supervisor.top.poller import Poller
from supervisor.top.sample import Sample
from supervisor.top.signals import Signals
from supervisor.top.terminal import Terminal
from supervisor.top.view import View, pressed, with_sample

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_BY_SIGNAL: Final = 128


def display(client: Client, first: Sample, interval_s: float, *, has_colour: bool) -> int:
    """Show samples until a key or a signal ends it; return the exit code."""
    with Signals() as signals, Terminal() as terminal:
        poller = Poller(client, interval_s, signals.wake)
        shown = _Display(poller, terminal, signals, has_colour=has_colour)
        poller.start()
        return shown.run(first)


class _Display:
    def __init__(
        self, poller: Poller, terminal: Terminal, signals: Signals, *, has_colour: bool
    ) -> None:
        self._poller = poller
        self._terminal = terminal
        self._signals = signals
        self._has_colour = has_colour
        self._sample = Sample()
        self._view = View()
        self._exit_code: int | None = None

    def run(self, first: Sample) -> int:
        self._take(first)
        while self._exit_code is None:
            self._draw()
            keyboard = self._terminal.fileno()
            ready, _, _ = select.select([keyboard, self._signals.fileno()], [], [])
            self._press(self._keys() if keyboard in ready else self._terminal.late_keys())
            self._handle(self._signals.take())
            while sample := self._poller.take():
                self._take(sample)
        return self._exit_code

    def _draw(self) -> None:
        area = Size(*self._terminal.size())
        lines = screen(self._view, self._sample, area, has_colour=self._has_colour)
        self._terminal.show(lines)

    def _take(self, sample: Sample) -> None:
        self._view = with_sample(self._view, sample)
        self._sample = replace(sample, note="")

    def _keys(self) -> list[str]:
        keys = self._terminal.keys()
        if keys is None:
            self._exit_code = _BY_SIGNAL + signal.SIGHUP
        return keys or []

    def _press(self, keys: Iterable[str]) -> None:
        for key in keys:
            step = pressed(self._view, key)
            self._view = with_sample(step.view, self._sample)
            if step.is_end:
                self._exit_code = 0
            if step.cancelled:
                self._cancel(step.cancelled)

    def _cancel(self, request_id: str) -> None:
        if not self._poller.cancel(request_id):
            self._view = replace(self._view, note="the daemon does not answer; try again later")

    def _handle(self, signals: set[int]) -> None:
        for number in _ENDING:
            if number in signals:
                self._exit_code = _BY_SIGNAL + number
        if signal.SIGTSTP in signals:
            self._suspend()

    def _suspend(self) -> None:
        """Give the terminal back, stop, and take it again when the shell continues us."""
        self._terminal.leave()
        os.kill(os.getpid(), signal.SIGSTOP)
        self._terminal.enter()
