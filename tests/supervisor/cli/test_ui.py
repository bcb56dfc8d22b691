"""Whether a browser can open a window."""

import pytest

from supervisor.cli.status import shows_windows


@pytest.mark.parametrize(
    ("environ", "platform", "expected"),
    [
        ({}, "linux", False),
        ({"DISPLAY": ""}, "linux", False),
        ({"DISPLAY": ":0"}, "linux", True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, "linux", True),
        ({"BROWSER": "firefox"}, "linux", True),
        ({}, "darwin", True),
    ],
)
def test_a_browser_needs_a_display(
    environ: dict[str, str], platform: str, *, expected: bool
) -> None:
    assert shows_windows(environ, platform) is expected
