"""Counts the values and levels of a JSON text before it is parsed. Pure.

The text is scanned once, in pieces: time is linear, and no piece holds the interpreter for more
than a few milliseconds. Invalid JSON gets some count; the parser rejects it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import accumulate
from typing import Final

from proxy.errors import BodyTooComplex

_PIECE_BYTES: Final = 64 * 1024
# In memory and time, a list or an object costs as much as several numbers, a member's name as two.
_CONTAINER_VALUES: Final = 8
_NAME_VALUES: Final = 2
_STEPS: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NOT_STRUCTURAL: Final = bytes(byte for byte in range(256) if byte not in b'",:[]{}')


def count_values(body: bytes, max_values: int, max_depth: int) -> int:
    """The number of values, or slightly more if that is within the limit.

    A number, a string or a literal counts 1, a member's name 2, a list or an object 8 plus its
    content. Raises BodyTooComplex above a limit.
    """
    # For a small text, first count inside strings too: most pass without the exact scan.
    if len(body) <= _PIECE_BYTES and (openings := body.count(b"[") + body.count(b"{")) <= max_depth:
        most = _values(body, openings)
        if most < max_values:
            return most + 1
    return _count_outside_strings(body, max_values, max_depth)


def _count_outside_strings(body: bytes, max_values: int, max_depth: int) -> int:
    values, depth = 1, 0
    for text in _outside_strings(body):
        steps = array("b", text.translate(_STEPS, b",:"))
        deepest = max(accumulate(steps, initial=depth))
        depth += sum(steps)
        values += _values(text, steps.count(1))
        if deepest > max_depth:
            reason = f"it has more than {max_depth} levels"
            raise BodyTooComplex(reason, "max_body_depth")
        if values > max_values:
            raise BodyTooComplex(f"it has more than {max_values} values", "max_body_values")
    return values


def _values(text: bytes, openings: int) -> int:
    return text.count(b",") + _NAME_VALUES * text.count(b":") + _CONTAINER_VALUES * openings


def _outside_strings(body: bytes) -> Iterator[bytes]:
    """Yield the characters `,:[]{}` outside of strings, piece by piece."""
    is_inside, held = False, b""
    for piece in _pieces(body):
        text, held = _unescaped(held + piece)
        # Drop everything else first: what is left is a small part of most texts.
        parts = text.translate(None, _NOT_STRUCTURAL).split(b'"')
        yield b"".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0


def _unescaped(text: bytes) -> tuple[bytes, bytes]:
    """A piece without escaped quotes, and a backslash that escapes into the next piece."""
    if b"\\" not in text:
        return text, b""
    is_open = (len(text) - len(text.rstrip(b"\\"))) % 2
    held = text[-1:] if is_open else b""
    text = text[: len(text) - is_open]
    return text.replace(b"\\\\", b"").replace(b'\\"', b""), held


def _pieces(body: bytes) -> Iterator[bytes]:
    if len(body) <= _PIECE_BYTES:
        yield body
        return
    for start in range(0, len(body), _PIECE_BYTES):
        yield body[start : start + _PIECE_BYTES]
