"""How many values a JSON text holds and how deep it lies, before anything is made of it. Pure.

The text is looked at in pieces, by operations that pass over each piece once: no input takes more
than a constant time per byte, and none takes the interpreter for longer than a few milliseconds.
What is no JSON is counted in some way and refused by the parser.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from itertools import accumulate
from typing import Final

from proxy.errors import BodyTooComplex

_PIECE_BYTES: Final = 64 * 1024
# A list or an object takes as much memory, and as much time to make, as several numbers; the name
# of a member as two.
_CONTAINER_VALUES: Final = 8
_NAME_VALUES: Final = 2
_STEPS: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NO_SIGNS: Final = bytes(byte for byte in range(256) if byte not in b'",:[]{}')


def count_values(body: bytes, max_values: int, max_depth: int) -> int:
    """Return how many values a JSON text holds, or a few more where that is within the limit.

    A number, a string or a word counts 1, the name of a member 2, a list or an object 8 beside what
    it holds.

    Args:
        body: The text.
        max_values: How many it may hold.
        max_depth: How deep lists and objects may lie in each other.

    Raises:
        BodyTooComplex: It holds more, or lies deeper.
    """
    # What stands in the strings of a small text may count too: most pass without a closer look.
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
    """Yield the signs `,:[]{}` that stand outside of strings, piece by piece."""
    is_inside, held = False, b""
    for piece in _pieces(body):
        text, held = _unescaped(held + piece)
        # First all that is no sign goes: what is left is a small part of most texts.
        parts = text.translate(None, _NO_SIGNS).split(b'"')
        yield b"".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0


def _unescaped(text: bytes) -> tuple[bytes, bytes]:
    """Return a piece without escaped quotes, and the backslash that belongs to the next one."""
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
