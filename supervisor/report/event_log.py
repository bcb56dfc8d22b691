"""The events of the daemon's log without what clients sent. Pure.

Fields are kept that are known to be safe, so that a new one is left out until somebody has looked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

LEFT_OUT: Final = "[left out]"
_SAFE_TEXT: Final = """
added after aliases before cancelled cause changed code devices ended_at engine event
fallback_for fault hook how id instance kept key kind level model models node nodes origin phase
priority profile removed request run settings signal stage status task timestamp value version
worker workers
"""
_SAFE: Final = frozenset(_SAFE_TEXT.split())
# Sentences of ours, of these events.
_OWN_SENTENCES: Final = frozenset({"error", "hint", "reason"})
_OURS: Final = (
    "canary.",
    "daemon.",
    "engine.",
    "instance.",
    "model.",
    "node.",
    "settings.",
    "slots.",
    "worker.",
)
# A sentence of ours that ends in a line of the engine's.
_QUOTED: Final = re.compile(r"(its last error: ).*", re.DOTALL)
_FRAME: Final = re.compile(r'  File "[^"]{1,400}", line \d{1,9}, in [\w<>.]{1,200}')
_ERROR: Final = re.compile(r"[A-Za-z_][\w.]{0,100}(?=\(|:|$)")


@dataclass(frozen=True, slots=True)
class CleanEvents:
    """`left_out`: lines that are no events."""

    lines: tuple[str, ...]
    left_out: int


def without_texts(lines: Iterable[str], *, has_quotes: bool) -> CleanEvents:
    """Return the events of a log.

    Args:
        lines: Of the daemon's log.
        has_quotes: Whether sentences of ours may quote a prompt, from the log of a verbose engine.
    """
    kept, left_out = [], 0
    for line in lines:
        event = _read(line)
        if event is None:
            left_out += bool(line.strip())
        else:
            kept.append(orjson.dumps(clean_event(event, has_quotes=has_quotes)).decode())
    return CleanEvents(tuple(kept), left_out)


def clean_event(event: Mapping[str, Any], *, has_quotes: bool) -> dict[str, Any]:
    name = str(event.get("event"))
    return {key: _clean(name, key, value, has_quotes) for key, value in event.items()}


def cut_quote(text: str) -> str:
    """Return a sentence of ours without the engine's line that it ends in."""
    return _QUOTED.sub(rf"\1{LEFT_OUT}", text)


def _clean(name: str, key: str, value: Any, has_quotes: bool) -> Any:  # noqa: FBT001
    if value is None or isinstance(value, bool | int | float) or key in _SAFE:
        return value
    if name == "task.failed" and key == "traceback":
        return "\n".join(_FRAME.findall(str(value)))
    if name == "task.failed" and key == "error":
        found = _ERROR.search(str(value).rpartition(": ")[2] or str(value))
        return found[0] if found else LEFT_OUT
    if key in _OWN_SENTENCES and name.startswith(_OURS) and not has_quotes:
        return cut_quote(str(value))
    return LEFT_OUT


def _read(line: str) -> dict[str, Any] | None:
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) and "event" in found else None
