"""`corral top`: models and requests in flight, refreshed until a key ends it."""

from __future__ import annotations

import os
import sys

from supervisor.control.client import Client
from supervisor.host.paths import directories
from supervisor.output import CommandResult, wants_colour
from supervisor.top.sample import Sample, read


def top(interval_s: float, *, once: bool) -> CommandResult:
    """Show models and requests until q or Ctrl-C; once, or without a terminal, one frame."""
    from supervisor.top.terminal import is_usable

    client = Client(directories().control_socket)
    first = read(client)
    if once or not is_usable():
        return _frame(first)
    from supervisor.top.display import display

    has_colour = wants_colour(sys.stdout)
    return CommandResult(None, exit_code=display(client, first, interval_s, has_colour=has_colour))


def _frame(sample: Sample) -> CommandResult:
    from supervisor.top.frame import once

    columns = os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else None
    text = once(sample, columns, has_colour=wants_colour(sys.stdout))
    # The text has no control characters but those of its colours.
    return CommandResult({"status": sample.status, "requests": sample.requests}, text, is_raw=True)
