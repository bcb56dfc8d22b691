"""What clients may know of a reason that names files: their names, not where they are. Pure.

A reason quotes settings, the system and the engine's log; `corral status` and `corral logs` show it
whole to the user of this machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_QUOTED: Final = re.compile(r"""(?P<mark>['"`])~?/[^'"`]*/(?P<name>[^'"`/]*)(?P=mark)""")
_BARE: Final = re.compile(r"""(?<![\w./~-])~?/(?:[^\s/'"`]+/)+""")


def without_directories(text: str, known: Iterable[Path] = ()) -> str:
    """Return a text in which absolute paths have only their last part.

    Args:
        text: A sentence.
        known: Files that it may name; with them, directories with a space in them are found too.
    """
    for directory in sorted({str(path.parent) for path in known}, key=len, reverse=True):
        text = text.replace(f"{directory}/", "")
    text = _QUOTED.sub(r"\g<mark>\g<name>\g<mark>", text)
    return _BARE.sub("", text)
