"""Parts of a GGUF header: numbers that can be mutated one by one, and bytes.

Source: docs/gguf.md of ggml.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

UINT32, _FLOAT32, _BOOL, STRING, ARRAY, _UINT64 = 4, 6, 7, 8, 9, 10
_FORMATS: Final = {UINT32: "<I", _FLOAT32: "<f", _BOOL: "<?", _UINT64: "<Q"}
HUGE: Final = (
    *(0, 1, 2, 31, 255, 1023, 1024, 1025, 65_535, 10**6, 10**7, 16_777_215, 16_777_216, 16_777_217),
    *(10**8, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**53, 2**63 - 1, 2**63, 2**64 - 1),
)
NAMES: Final = (
    "tiny",
    "\x1b]0;title\x07",
    "a\nb",
    "\u202eevil",
    "",
    "x" * 100_000,
    "\ud7ff\x00",
    "🦙",
)


@dataclass(frozen=True)
class Number:
    """A number of the header that can be mutated on its own."""

    form: str
    value: Any

    def packed(self) -> bytes:
        size = struct.calcsize(self.form) * 8
        value = self.value
        if isinstance(value, int) and self.form in {"<I", "<Q"}:
            value %= 1 << size
        return struct.pack(self.form, value)


Atom = Number | bytes


def string(text: str) -> list[Atom]:
    encoded = text.encode("utf-8", "surrogatepass")
    return [Number("<Q", len(encoded)), encoded]


def pair(random: Random, key: str) -> list[Atom]:
    """Return a hyper-parameter: mostly small, at times an array or of another type."""
    head = string(key)
    chance = random.random()
    small = random.choice((1, 2, 4, 8, 64, 128))
    if chance < 0.70:
        return [*head, Number("<I", UINT32), Number("<I", small)]
    if chance < 0.80:
        return [*head, Number("<I", _UINT64), Number("<Q", random.choice(HUGE))]
    if chance < 0.90:
        kind = random.choice((UINT32, _BOOL, _FLOAT32, _UINT64))
        numbers: Sequence[Atom] = [Number(_FORMATS[kind], 1)] * small
        return [*head, Number("<I", ARRAY), Number("<I", kind), Number("<Q", small), *numbers]
    if chance < 0.95:
        value = random.choice((0.0, -1.0, float("nan"), float("inf"), 1e38))
        return [*head, Number("<I", _FLOAT32), Number("<f", value)]
    return [*head, Number("<I", STRING), *string(random.choice(NAMES))]


def tensors(random: Random) -> list[list[Atom]]:
    names = (
        "token_embd.weight",
        "output.weight",
        "blk.0.attn_q.weight",
        "blk.1.ffn_up.weight",
        "x",
    )
    return [
        [
            *string(name),
            Number("<I", 2),
            Number("<Q", random.choice((8, 32, 256))),
            Number("<Q", random.choice((1, 3, 256))),
            Number("<I", random.choice((0, 1, 2, 8, 12, 99))),
            Number("<Q", 0),
        ]
        for name in names[: random.randrange(len(names) + 1)]
    ]
