"""Removes directories from reasons that clients see. Pure.

A reason quotes settings, the system and the engine's log; `corral status` and `corral logs` show
the user of this machine all of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_QUOTED: Final = re.compile(r"""(?P<mark>['"`])~?/[^'"`]*/(?P<name>[^'"`/]*)(?P=mark)""")
_BARE: Final = re.compile(r"""(?<![\w./~-])~?/(?:[^\s/'"`]+/)+""")


def without_directories(text: str, known: Iterable[Path] = ()) -> str:
    """Reduce absolute paths to their last part.

    Directories with a space in them are only found for `known` files.
    """
    for directory in sorted({str(path.parent) for path in known}, key=len, reverse=True):
        text = text.replace(f"{directory}/", "")
    text = _QUOTED.sub(r"\g<mark>\g<name>\g<mark>", text)
    return _BARE.sub("", text)
