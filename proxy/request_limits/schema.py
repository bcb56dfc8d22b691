"""The size of a JSON schema, measured without recursion. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.request_limits.limit import Limit
from proxy.request_limits.schema_ways import count_schema_ways
from proxy.request_limits.text import Patterns


class Schemas:
    """All schemas of one request, which share their limits.

    Args:
        limit: Refuses what is too much.
        patterns: The regular expressions of the request.
    """

    def __init__(self, limit: Limit, patterns: Patterns) -> None:
        self._limit = limit
        self._patterns = patterns
        self._values = 0

    def check(self, member: str, schema: object) -> None:
        """Measure a member that holds schemas, whatever else is in it.

        Raises:
            LimitExceeded: It is too large.
        """
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
        ways = count_schema_ways(schema)
        self._limit(member, "ways to go on at once in its schema", ways, "grammar_ways")

    def _count(self, member: str, values: int, depth: int) -> None:
        self._values += values
        self._limit(member, "values in its schema", self._values, "schema_values")
        self._limit(member, "levels in its schema", depth, "schema_depth")

    def _check_object(self, member: str, schema: Mapping[str, Any]) -> None:
        for name, value in schema.items():
            if isinstance(value, list) and name != "required":
                self._limit(member, f"entries of {name[:40]}", len(value), "schema_choices")
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, dict):
            named = required if isinstance(required, list) else ()
            optional = len(properties.keys() - {one for one in named if isinstance(one, str)})
            self._limit(member, "optional properties of an object", optional, "schema_optional")
        pattern = schema.get("pattern")
        if isinstance(pattern, str):
            self._patterns.check(f"pattern in {member}", pattern)
