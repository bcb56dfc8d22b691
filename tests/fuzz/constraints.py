"""Grammars, schemas and triggers that are expensive for an engine, or crash it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

from fuzz.mutate import INTEGERS, TEXTS, Raw, nested, odd

COUNTS: Final = (10, 300, 2_000, 30_000)
Members = dict[str, Any]


def grammar(random: Random) -> Members:
    count = random.choice((*COUNTS, 100_000))
    grammars: Sequence[Callable[[], str]] = (
        lambda: "root ::= " + "(" * count + '"a"' + ")" * count,
        lambda: "root ::= " + "(" * count + '"a"' + ")*" * count,
        lambda: "root ::= " + " | ".join(f'"{number}"' for number in range(count)),
        lambda: (
            "root ::= r0\n"
            + "\n".join(f"r{i} ::= r{i + 1}" for i in range(count))
            + f'\nr{count} ::= "a"'
        ),
        lambda: 'root ::= root "a" | "b"',
        lambda: _doubled(min(count, 2000), random.choice(("{0} {0}", "{0} | {0}"))),
        lambda: "root ::= root",
        lambda: f'root ::= "a"{{{count}}}',
        lambda: f'root ::= ("a"{{0,{count}}}){{0,{count}}}',
        lambda: 'root ::= ("a"?)*' + "*" * min(count, 1000),
        lambda: "root ::= [" + "a-z" * count + "]+",
        lambda: "root ::= " + '"a" ' * count,
        lambda: 'root ::= "' + "\\x41" * count + '"',
        lambda: "root ::= [^\\U00000000-\\U0010FFFF]",
        lambda: 'root ::= "a" missing',
        lambda: 'start ::= "a"',
        lambda: random.choice(TEXTS),
    )
    return {"grammar": random.choice(grammars)()}


def _doubled(count: int, form: str) -> str:
    rules = "\n".join(f"r{i} ::= " + form.format(f"r{i + 1}") for i in range(count))
    return f'root ::= "b" r0\n{rules}\nr{count} ::= "a" | ""'


def _doubled_schema(count: int) -> Members:
    each = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**each, f"d{count}": {"type": "integer"}}}


def schema(random: Random) -> Members:
    count = random.choice(COUNTS)
    deep: Any = Raw(
        b'{"type":"array","items":' * min(count, 5000) + b"{}" + b"}" * min(count, 5000)
    )
    schemas: Sequence[Callable[[], Any]] = (
        lambda: {
            "type": "object",
            "properties": {f"p{i}": {"type": "string"} for i in range(count)},
        },
        lambda: {"type": "string", "pattern": "^" + "(" * count + "a" + ")" * count + "$"},
        lambda: {"type": "string", "pattern": "^(a{1,1000}){1,1000}$"},
        lambda: {"type": "string", "pattern": "^" + "(a|b)?" * count + "$"},
        lambda: {
            "type": "string",
            "pattern": random.choice(("(", "[", "a{", "\\", "^(?=a)$", "\\p{L}")),
        },
        lambda: {"$ref": "#"},
        lambda: _doubled_schema(min(count, 2000)),
        lambda: {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        },
        lambda: {
            "$ref": random.choice(("http://127.0.0.1:1/x", "file:///etc/passwd", "#/none", 5))
        },
        lambda: {"anyOf": [{"const": i} for i in range(count)]},
        lambda: {"enum": list(range(count))},
        lambda: {
            "type": "array",
            "minItems": random.choice(INTEGERS),
            "maxItems": random.choice(INTEGERS),
        },
        lambda: {"type": "string", "minLength": random.choice(INTEGERS)},
        lambda: {
            "type": "integer",
            "minimum": random.choice(INTEGERS),
            "maximum": random.choice(INTEGERS),
        },
        lambda: {"allOf": [{"properties": {f"a{i}": {}}} for i in range(count)]},
        lambda: {"type": [random.choice(TEXTS)[:20]] * 3, "format": random.choice(TEXTS)[:20]},
        lambda: deep,
        lambda: nested(min(count, 5000), "object"),
        lambda: odd(random),
    )
    made = random.choice(schemas)()
    tool = {"type": "function", "function": {"name": "f", "parameters": made}}
    places: Sequence[Members] = (
        {"json_schema": made},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "s", "schema": made},
            }
        },
        {"response_format": {"type": "json_object", "schema": made}},
        {"tools": [tool], "tool_choice": "required"},
    )
    return random.choice(places)


def triggers(random: Random) -> Members:
    count = random.choice((10, 1000, 50_000))
    value = random.choice(
        ("(" * count + ")" * count, "(a*)*" * 20 + "b", "a|" * count, "[", "\\", "a{99999}")
    )
    trigger = {
        "type": random.choice((0, 1, 2, 3, 9, "word")),
        "value": value,
        "token": random.choice(INTEGERS),
    }
    return {"grammar": 'root ::= "a"', "grammar_lazy": True, "grammar_triggers": [trigger]}
