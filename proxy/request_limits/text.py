"""Grammars and regular expressions of one request, held to their limits."""

from __future__ import annotations

from proxy.request_limits.expression import Shape, measure
from proxy.request_limits.limit import Limit
from proxy.request_limits.ways import count_ways


def check_grammar(limit: Limit, member: str, text: str) -> None:
    """Refuse a grammar that is too large.

    Raises:
        LimitExceeded: It is.
    """
    limit(member, "characters", len(text), "grammar_bytes")
    measure(text, lambda shape: _check(limit, member, shape), is_grammar=True)
    limit(member, "ways to go on at once", count_ways(text), "grammar_ways")


class Patterns:
    """All regular expressions of one request, which share the limit of their length."""

    def __init__(self, limit: Limit) -> None:
        self._limit = limit
        self._chars = 0

    def count(self, member: str, text: str) -> None:
        """Refuse one text too many that an engine makes an expression of.

        Raises:
            LimitExceeded: It is.
        """
        self._chars += len(text)
        what = "characters of regular expressions"
        self._limit(member, what, self._chars, "pattern_bytes")

    def check(self, member: str, text: str) -> None:
        """Refuse an expression that is too large, or one too many.

        Raises:
            LimitExceeded: It is.
        """
        self.count(member, text)
        measure(text, lambda shape: _check(self._limit, member, shape), is_grammar=False)


def _check(limit: Limit, member: str, shape: Shape) -> None:
    limit(member, "parentheses inside one another", shape.depth, "grammar_depth")
    limit(member, "rules", shape.rules, "grammar_rules")
    limit(member, "alternatives", shape.alternatives, "grammar_alternatives")
    limit(member, "optional parts in a row", shape.optionals, "grammar_optionals")
