"""Seeded TOML: tables with mutated values and mutated text."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any, Final

from fuzz.mutate import INTEGERS, NUMBERS, TEXTS, Raw, changed_bytes

_TOKENS: Final = (
    *(b"[", b"]", b"[[", b"]]", b"=", b"\n", b'"', b"'''", b'"""', b"#", b".", b",", b"{", b"}"),
    *(
        b"inf",
        b"nan",
        b"1979-05-27T07:32:00Z",
        b"0x",
        b"1e",
        b"\\u0000",
        b"\\UFFFFFFFF",
        b"\xff",
        b"\0",
    ),
    *(b"\r", b"\xef\xbb\xbf", b"\x1b[2J", b"a.b.c.d", b"true"),
)
_RAW: Final = (
    *(
        "inf",
        "-inf",
        "nan",
        "1979-05-27",
        "07:32:00",
        "1979-05-27T07:32:00Z",
        "0xdeadbeef",
        "1_000",
    ),
    *("9" * 30, "9" * 5000, "1e400", "-0.0", "true", "[]", "{}", "''", '"\\u001b[2J"', '"\\u0000"'),
)
_DEPTHS: Final = (10, 300, 100_000)


def odd(random: Random) -> Any:
    depth = random.choice(_DEPTHS)
    kinds: Sequence[Callable[[], Any]] = (
        lambda: random.choice(INTEGERS),
        lambda: random.choice(NUMBERS),
        lambda: random.choice(TEXTS),
        lambda: random.choice(TEXTS),
        lambda: Raw(random.choice(_RAW).encode()),
        lambda: Raw(random.choice(_RAW).encode()),
        lambda: [odd(random) for _ in range(random.randrange(4))],
        lambda: {"a": odd(random)},
        lambda: Raw(b"[" * depth + b"]" * depth),
        lambda: Raw(b"{a=" * depth + b"1" + b"}" * depth),
    )
    return random.choice(kinds)()


def changed(random: Random, tables: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Return the text of mutated tables: name → keys → values; the name "" is the top level."""
    made = {name: dict(table) for name, table in tables.items()}
    for _ in range(random.choice((0, 1, 1, 1, 2, 4))):
        _change(random, made)
    text = dump(made)
    if random.random() < 0.3:
        text = changed_bytes(random, text, _TOKENS)
    if random.random() < 0.02:
        depth = random.choice(_DEPTHS)
        text += random.choice((b"[" + b"a." * depth + b"a]", b"b" + b".b" * depth + b" = 1"))
    return text


def _change(random: Random, tables: dict[str, dict[str, Any]]) -> None:
    name = random.choice(list(tables))
    table = tables[name]
    match random.randrange(8):
        case 0:
            tables[random.choice(TEXTS)[:60] + "x"] = {"a": odd(random)}
        case 1:
            table[random.choice(TEXTS)[:60] + "x"] = odd(random)
        case 2 if table:
            del table[random.choice(list(table))]
        case 3:
            tables[f"{name}.more" if name else "more"] = tables.pop(name)
        case _ if table:
            table[random.choice(list(table))] = odd(random)


def dump(tables: Mapping[str, Mapping[str, Any]]) -> bytes:
    """Return the text of tables; the caller quotes keys that contain dots."""
    parts = []
    for name, table in sorted(tables.items(), key=lambda table: table[0] != ""):
        head = [f"[{_table_name(name)}]".encode()] if name else []
        lines = [_text(key) + b" = " + value(entry) for key, entry in table.items()]
        parts.append(b"\n".join((*head, *lines, b"")))
    return b"\n".join(parts)


def _table_name(name: str) -> str:
    is_plain = name.replace(".", "").replace("_", "").replace("-", "").isascii()
    return name if is_plain and name.replace(".", "a").isprintable() else json.dumps(name)


def value(entry: Any) -> bytes:
    if isinstance(entry, Raw):
        return entry.data
    if isinstance(entry, dict):
        return b"{" + b", ".join(_text(k) + b" = " + value(v) for k, v in entry.items()) + b"}"
    if isinstance(entry, list | tuple):
        return b"[" + b", ".join(map(value, entry)) + b"]"
    if isinstance(entry, str):
        return _text(entry)
    return str(entry).lower().encode()


def _text(text: str) -> bytes:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F").encode()
