"""Command lines for a reader's shell."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from supervisor.host.files import expanded


def shell(words: Sequence[str], home: Path | None = None) -> str:
    """Quote the words of a command; the home directory, which often names a person, becomes `~`."""
    start = f"{home or expanded(Path('~'))}/"
    return " ".join(_word(word, start) for word in words)


def _word(word: str, home: str) -> str:
    if word.startswith(home) and word != home:
        return f"~/{shlex.quote(word.removeprefix(home))}"
    return shlex.quote(word)
