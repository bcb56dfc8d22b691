"""Figures of trials on disk, so that they outlast a restart of the daemon.

Numbers only, one file for each pair of sides, for this user alone. A file that was altered or
cannot be used counts as missing.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from supervisor.fleet.launch_id import LaunchFingerprint
from supervisor.host import json_cache
from supervisor.host.paths import is_ours
from supervisor.trial.equal_load import Value
from supervisor.trial.figures import SIDES, Side, TrialFigures

_FILES_MAX: Final = 64
_DIGITS: Final = 4
_COUNTS: Final = ("requests", "errors", "crashes", "others")
_NUMBER_MAX: Final = 2**53


class TrialStore:
    """The files below `root`, which is made when something is saved."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def save(self, key: str, value: Mapping[str, Any]) -> None:
        """Save what `content` returned; errors of the disk are ignored."""
        json_cache.put(self._root, key, value)
        with suppress(OSError):
            for path in sorted(self._root.glob("*.json"), key=_mtime_s)[:-_FILES_MAX]:
                path.unlink()

    def read(self, key: str) -> tuple[float, TrialFigures] | None:
        """Return for how many seconds a trial was observed, and its figures."""
        found = json_cache.get(self._root, key)
        with suppress(TypeError, ValueError, LookupError, AttributeError):
            return (_number(found["age_s"]), _figures(found)) if found else None
        return None

    def forget(self, key: str) -> None:
        if is_ours(self._root):
            with suppress(OSError):
                (self._root / f"{key}.json").unlink()


def key_of(model: str, sides: Iterable[LaunchFingerprint]) -> str:
    """Return the name of a trial's file: a hash of its model and of what both sides run with."""
    parts = (
        repr(
            (
                one.engine,
                one.library_dirs,
                one.model,
                one.draft,
                sorted(one.flags.items()),
                one.args,
            )
        )
        for one in sides
    )
    return hashlib.sha256("\n".join((model, *parts)).encode()).hexdigest()[:32]


def content(age_s: float, figures: TrialFigures) -> dict[str, Any]:
    return {"age_s": round(age_s), **{name: _stored(figures.sides[name]) for name in SIDES}}


def _stored(side: Side) -> dict[str, Any]:
    return {
        **{name: getattr(side, name) for name in _COUNTS},
        "conversations": [
            [_rounded(one.rates), _rounded(one.first_tokens_s), one.is_excluded]
            for one in side.conversations.values()
        ],
    }


def _rounded(values: Iterable[Value]) -> list[Value]:
    return [(float(f"{value:.{_DIGITS}g}"), others) for value, others in values]


def _figures(found: Mapping[str, Any]) -> TrialFigures:
    figures = TrialFigures()
    for name in SIDES:
        _fill(figures.sides[name], found[name])
    return figures


def _fill(side: Side, found: Mapping[str, Any]) -> None:
    for name in _COUNTS:
        setattr(side, name, int(_number(found[name])))
    for number, (rates, first_tokens_s, is_excluded) in enumerate(found["conversations"]):
        # No conversation of this daemon has such a name: their numbers begin at 1 again.
        one = side.latest(f"before {number}")
        _extend(one.rates, rates)
        _extend(one.first_tokens_s, first_tokens_s)
        one.is_excluded = bool(is_excluded)


def _extend(values: deque[Value], found: Iterable[Any]) -> None:
    values.extend((_number(value), int(_number(others))) for value, others in found)


def _number(value: Any) -> float:
    number = float(value)
    if not (math.isfinite(number) and 0 <= number <= _NUMBER_MAX):
        raise ValueError(f"{number} is no figure")
    return number


def _mtime_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
