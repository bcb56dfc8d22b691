"""In how many ways an engine must read the grammar that it makes of a JSON schema. Pure.

Source: json_schema_to_grammar in common/json-schema-to-grammar.cpp of llama.cpp, build 10434.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final
from urllib.parse import unquote

from proxy.request_limits.ways import Part, Rules, settled

_CHOICES: Final = ("anyOf", "oneOf", "allOf")
_ROOTS: Final = frozenset({"schema", "json_schema", "parameters", "input_schema"})


def count_schema_ways(schema: object) -> int:
    """Return the same for the grammars that an engine makes of JSON schemas.

    Args:
        schema: A schema, or JSON with schemas in it. References are looked up from where the first
            member begins that holds a schema.
    """
    rules: Rules = {}
    todo: list[tuple[object, object]] = [(schema, schema)]
    while todo:
        value, root = todo.pop()
        if isinstance(value, dict) and (choices := _of_schema(value, root)):
            rules[id(value)] = choices
        for key, one in _items(value):
            is_root = root is schema and key in _ROOTS
            todo.append((one, one if is_root else root))
    return settled(rules)


def _of_schema(schema: Mapping[str, object], root: object) -> list[list[Part]]:
    """Return the alternatives of a schema; what it holds otherwise has a character before it."""
    choices: list[list[Part]] = []
    for key in _CHOICES:
        if isinstance(many := schema.get(key), list):
            choices += [[Part(id(one))] for one in many]
    if isinstance(path := schema.get("$ref"), str):
        # json_schema of a response holds the schema one level deeper.
        inner = root.get("schema") if isinstance(root, dict) else None
        found = (_looked_up(root, path), _looked_up(inner, path))
        choices += [[Part(id(one))] for one in found if one is not None]
    return choices


def _looked_up(value: object, path: str) -> object:
    """Return what a reference such as `#/$defs/a` means, or None. Source: RFC 6901."""
    for key in unquote(path).removeprefix("#").split("/")[1:]:
        name = key.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(name)
        elif isinstance(value, list) and name.isdecimal() and int(name[:9]) < len(value):
            value = value[int(name[:9])]
        else:
            return None
    return value


def _items(value: object) -> Iterator[tuple[object, object]]:
    pairs: Iterable[tuple[object, object]] = ()
    if isinstance(value, dict):
        pairs = value.items()
    elif isinstance(value, list):
        pairs = enumerate(value)
    return ((key, one) for key, one in pairs if isinstance(one, dict | list))
