"""Seeded mutations of bytes and JSON values."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Final

INTEGERS: Final = (
    *(0, 1, -1, 2, 7, 63, 64, 65, 255, 256, 65_535, 65_536, 10**6, 10**8),
    *(2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**32, 2**53, 2**63 - 1, 2**63, -(2**63)),
    *(2**64 - 1, 2**64, 10**30),
)
NUMBERS: Final = (0.0, -0.0, 0.5, -1.5, 1e-320, 1e38, 1e39, 1e308, -1e308)
TEXTS: Final = (
    *("", "a", "hello", "null", "\0", "\x1b[2J", "\r\nX: 1", "../../etc/passwd", "{{", "{% x %}"),
    *("\ufeff", "\u202e", "\U0001f999", "ﷺ" * 20, "%s%n", "<|im_end|>", "a" * 5000, "-1", "1e999"),
)
BYTES: Final = (b"\0", b"\xff", b"\r\n", b"\n", b"\t", b" ", b'"', b"\\", b"{", b"[", b"=", b":")
_SHARE_OF_DUPLICATES: Final = 0.03


@dataclass(frozen=True)
class Raw:
    """Bytes that are inserted into JSON unchanged, such as `NaN` or a lone surrogate."""

    data: bytes


RAW: Final = tuple(
    Raw(data)
    for data in (
        *(b"NaN", b"-Infinity", b"1e999", b"-", b"01", b"tru", b"'a'", b"[1,]", b'"\\ud800"'),
        *(b'"\\u0000"', b'"\\x00"', b'"\xff\xfe"', b'"\x00"', b"9" * 400, b"1e-999", b'{"a":1,}'),
        *(b"[" * 200 + b"]" * 200, b'{"a":' * 300 + b"1" + b"}" * 300, b"[" * 2000 + b"]" * 2000),
    )
)


def encode(value: Any, random: Random | None = None) -> bytes:
    """Serialise to JSON; with a source of randomness, some members are duplicated."""
    if isinstance(value, Raw):
        return value.data
    if isinstance(value, dict):
        pairs = [
            json.dumps(str(key)).encode() + b":" + encode(v, random) for key, v in value.items()
        ]
        if random and pairs and random.random() < _SHARE_OF_DUPLICATES:
            pairs.append(random.choice(pairs).partition(b":")[0] + b":" + encode(odd(random)))
        return b"{" + b",".join(pairs) + b"}"
    if isinstance(value, list | tuple):
        return b"[" + b",".join(encode(entry, random) for entry in value) + b"]"
    return json.dumps(value).encode()


def odd(random: Random) -> Any:
    kinds: Sequence[Callable[[], Any]] = (
        lambda: random.choice(INTEGERS),
        lambda: random.choice(NUMBERS),
        lambda: random.choice(TEXTS),
        # Most of these make the whole body invalid JSON.
        lambda: random.choice(RAW) if random.random() < 0.4 else random.choice(TEXTS),
        lambda: random.choice((None, True, False)),
        lambda: [odd(random) for _ in range(random.randrange(4))],
        lambda: {random.choice(TEXTS)[:50]: odd(random) for _ in range(random.randrange(3))},
        lambda: [random.choice(INTEGERS)] * random.choice((1, 100, 3000)),
        lambda: nested(
            random.choice((5, 100, 254, 255, 400, 1023)), random.choice(("list", "object"))
        ),
    )
    return random.choice(kinds)()


def nested(depth: int, kind: str) -> Raw:
    if kind == "list":
        return Raw(b"[" * depth + b"]" * depth)
    return Raw(b'{"a":' * depth + b"0" + b"}" * depth)


def changed(random: Random, value: Any) -> Any:
    if isinstance(value, dict) and value and random.random() < 0.85:
        return _changed_object(random, value)
    if isinstance(value, list) and value and random.random() < 0.75:
        return _changed_list(random, value)
    return odd(random)


def _changed_object(random: Random, value: dict[str, Any]) -> dict[str, Any]:
    key = random.choice(list(value))
    match random.randrange(12):
        case 0:
            return {entry: value[entry] for entry in value if entry != key}
        case 1:
            return {**value, random.choice(TEXTS)[:100]: odd(random)}
        case 2:
            return {
                (random.choice(TEXTS)[:40] if entry == key else entry): value[entry]
                for entry in value
            }
        case _:
            return {**value, key: changed(random, value[key])}


def _changed_list(random: Random, value: list[Any]) -> list[Any]:
    at = random.randrange(len(value))
    match random.randrange(8):
        case 0:
            return []
        case 1:
            return value * random.choice((2, 10, 200))
        case 2:
            return [*value, odd(random)]
        case _:
            return [*value[:at], changed(random, value[at]), *value[at + 1 :]]


def changed_bytes(random: Random, data: bytes, tokens: Sequence[bytes] = BYTES) -> bytes:
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        data = _changed_once(random, data, tokens)
    return data


def _changed_once(random: Random, data: bytes, tokens: Sequence[bytes]) -> bytes:
    at = random.randrange(len(data) + 1)
    upto = min(len(data), at + random.choice((1, 1, 2, 4, 16, 100)))
    before, piece, after = data[:at], data[at:upto], data[upto:]
    token = random.choice(tokens)
    changes = (
        before,
        before + after,
        before + piece * random.choice((2, 3, 50)) + after,
        before + random.randbytes(len(piece)) + after,
        before + bytes(byte ^ 1 << random.randrange(8) for byte in piece[:1]) + piece[1:] + after,
        before + token * random.choice((1, 2, 2000)) + piece + after,
        before + token + after,
    )
    return random.choice(changes)
