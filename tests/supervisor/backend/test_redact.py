"""Directories are removed from reasons for clients."""

from pathlib import Path

import pytest

from supervisor.backend.models import without_directories


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no file /home/me/models/a.gguf; see doctor", "no file a.gguf; see doctor"),
        ("failed to open '/home/me/my models/a.gguf'", "failed to open 'a.gguf'"),
        ('exec "/opt/x/llama-server": denied', 'exec "llama-server": denied'),
        ("gguf: /srv/a b/m.gguf is cut short", "gguf: m.gguf is cut short"),
        ("read ~/models/a.gguf twice", "read a.gguf twice"),
        ("path=/srv/models/a.gguf", "path=a.gguf"),
        ("it is stopped (corral start a/b)", "it is stopped (corral start a/b)"),
        (
            "1/2 of it, and/or more at http://localhost/x",
            "1/2 of it, and/or more at http://localhost/x",
        ),
    ],
)
def test_only_the_last_part_of_a_path_is_left(text: str, shown: str) -> None:
    assert without_directories(text, [Path("/srv/a b/m.gguf")]) == shown


def test_a_long_line_costs_no_more_than_its_length() -> None:
    assert len(without_directories("-/" * 500_000)) > 0
