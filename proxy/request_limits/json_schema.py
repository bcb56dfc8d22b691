"""Limits of JSON schemas, measured without recursion.

Source: json_schema_to_grammar in common/json-schema-to-grammar.cpp of llama.cpp, build 10434.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final
from urllib.parse import unquote

from proxy.request_limits.grammar import Patterns
from proxy.request_limits.grammar_stacks import Part, Rules, most_stacks
from proxy.request_limits.limits import RequestLimits

_ALTERNATIVES: Final = ("anyOf", "oneOf", "allOf")
_ROOTS: Final = frozenset({"schema", "json_schema", "parameters", "input_schema"})


class Schemas:
    """All JSON schemas of one request, which share their limits."""

    def __init__(self, limits: RequestLimits, patterns: Patterns) -> None:
        self._limits = limits
        self._patterns = patterns
        self._values = 0

    def check(self, member: str, schema: object) -> None:
        """Measure a member that contains schemas."""
        todo: list[tuple[object, int]] = [(schema, 1)]
        while todo:
            value, depth = todo.pop()
            inner: Sequence[object] = ()
            if isinstance(value, dict):
                self._check_object(member, value)
                inner = tuple(value.values())
            elif isinstance(value, list):
                inner = value
            self._count(member, len(inner), depth)
            todo += [(one, depth + 1) for one in inner if isinstance(one, dict | list)]
        stacks = most_stacks(_rules_of(schema))
        self._limits.enforce(member, "parse stacks in its schema", stacks, "grammar_stacks")

    def _count(self, member: str, values: int, depth: int) -> None:
        self._values += values
        self._limits.enforce(member, "values in its schema", self._values, "schema_values")
        self._limits.enforce(member, "levels in its schema", depth, "schema_depth")

    def _check_object(self, member: str, schema: Mapping[str, Any]) -> None:
        for name, value in schema.items():
            if isinstance(value, list) and name != "required":
                unit = f"entries of {name[:40]}"
                self._limits.enforce(member, unit, len(value), "schema_choices")
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, dict):
            named = required if isinstance(required, list) else ()
            optional = len(properties.keys() - {one for one in named if isinstance(one, str)})
            unit = "optional properties of an object"
            self._limits.enforce(member, unit, optional, "schema_optional")
        pattern = schema.get("pattern")
        if isinstance(pattern, str):
            self._patterns.check(f"pattern in {member}", pattern)


def _rules_of(schema: object) -> Rules:
    """One rule for each schema object that has alternatives, by its `id`.

    References are resolved from the first member that contains a schema.
    """
    rules: Rules = {}
    todo: list[tuple[object, object]] = [(schema, schema)]
    while todo:
        value, root = todo.pop()
        if isinstance(value, dict) and (alternatives := _alternatives(value, root)):
            rules[id(value)] = alternatives
        for key, one in _items(value):
            if isinstance(one, dict | list):
                todo.append((one, one if root is schema and key in _ROOTS else root))
    return rules


def _alternatives(schema: Mapping[str, object], root: object) -> list[list[Part]]:
    """All other members of a schema begin with a character of their own."""
    found: list[object] = []
    for key in _ALTERNATIVES:
        if isinstance(many := schema.get(key), list):
            found += many
    if isinstance(path := schema.get("$ref"), str):
        # `json_schema` of a response contains the schema one level deeper.
        inner = root.get("schema") if isinstance(root, dict) else None
        targets = (_resolve(root, path), _resolve(inner, path))
        found += [one for one in targets if one is not None]
    return [[Part(id(one))] for one in found]


def _resolve(value: object, path: str) -> object:
    """The target of a reference such as `#/$defs/a`, or None. Source: RFC 6901."""
    for key in unquote(path).removeprefix("#").split("/")[1:]:
        name = key.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict):
            value = value.get(name)
        elif isinstance(value, list) and name.isdecimal() and int(name[:9]) < len(value):
            value = value[int(name[:9])]
        else:
            return None
    return value


def _items(value: object) -> Iterable[tuple[object, object]]:
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list) else ()
