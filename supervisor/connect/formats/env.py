"""Lines of NAME=VALUE, as systemd, Docker and shells read them. Pure."""

from __future__ import annotations

import re
import shlex
from typing import Any, Final

from supervisor.connect.place import ABSENT, Place

_LINE: Final = re.compile(r"\s*(?:export\s+)?([A-Za-z_][A-Za-z0-9_]*)=(.*)")


def read(text: str, place: Place) -> Any:
    """Return the last value of a name, as a shell would."""
    found = [one[2] for line in text.splitlines() if (one := _named(line, place))]
    return "".join(shlex.split(found[-1])) if found else ABSENT


def put(text: str, place: Place, value: Any) -> str:
    line = f"{place[0]}={shlex.quote(str(value))}"
    if read(text, place) is ABSENT:
        end = "" if not text or text.endswith("\n") else "\n"
        return f"{text}{end}{line}\n"
    return _joined([line if _named(one, place) else one for one in text.splitlines()])


def drop(text: str, place: Place) -> str:
    return _joined([one for one in text.splitlines() if not _named(one, place)])


def _named(line: str, place: Place) -> re.Match[str] | None:
    found = _LINE.fullmatch(line)
    return found if found and found[1] == place[0] else None


def _joined(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)
