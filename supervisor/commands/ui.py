"""`corral ui`: the dashboard of the running daemon, in the browser."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Mapping

from supervisor.control.client import Client
from supervisor.host.paths import directories
from supervisor.output import CommandResult


def ui(*, opens: bool) -> CommandResult:
    """Open the dashboard, signed in; without a browser, or where none is wanted, show its link."""
    link = Client(directories().control_socket).dashboard_link()
    is_opened = opens and _open(link)
    data = {"url": link, "is_opened": is_opened}
    if is_opened:
        return CommandResult(data, f"opened {link.partition('#')[0]} in the browser")
    note = "the link signs one browser in, within a minute"
    missing = ("no browser was found; open the link in one",) if opens else ()
    return CommandResult(data, link, (*missing, note))


def _open(link: str) -> bool:
    try:
        return shows_windows(os.environ, sys.platform) and webbrowser.open(link)
    except webbrowser.Error:
        return False


def shows_windows(environ: Mapping[str, str], platform: str) -> bool:
    """Return whether a browser can open a window; without, Python starts one in the terminal."""
    if platform in {"darwin", "win32"}:
        return True
    return any(environ.get(name) for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"))
