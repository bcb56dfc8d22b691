"""The syntax of unit files. Pure.

Source: systemd.syntax(7), systemd.service(5) "Command lines", systemd.unit(5) "Specifiers".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from supervisor.errors import SettingsInvalid

# By this line, a file that a user wrote is told from ours.
MARK: Final = "# Written by `corral service install`, which replaces it; your changes belong into"
_PLAIN: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-+=.,:/@")

Lines = Sequence[str]


def unit_text(name: str, *sections: tuple[str, Lines]) -> str:
    """Return a unit file; lines of a section without `=` are comments."""
    parts = [f"{MARK}\n# `systemctl edit {name}`."]
    parts += ["\n".join((f"[{title}]", *lines)) for title, lines in sections]
    return "\n\n".join(parts) + "\n"


def command_line(words: Iterable[str]) -> str:
    """Return the words as ExecStart takes them."""
    return " ".join(_quoted(escaped(word).replace("$", "$$")) for word in words)


def assignment(name: str, value: str) -> str:
    """Return a value of `Environment=`, in which the caller has escaped `%`."""
    return _quoted(f"{name}={value}")


def escaped(text: str) -> str:
    """Return text without specifiers; raises SettingsInvalid for what no line can hold."""
    if not text.isprintable():
        raise SettingsInvalid(f"{text!a} cannot stand in a unit file: it has control characters")
    return text.replace("%", "%%")


def _quoted(text: str) -> str:
    if text and set(text) <= _PLAIN:
        return text
    backslashed = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{backslashed}"'
