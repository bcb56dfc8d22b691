"""Rejects requests that exceed `[proxy.limits]`. Time is linear in the request's size.

Only members that llama-server reads are checked, under all names that its endpoints know: OpenAI's,
Anthropic's and its own. The engine itself rejects members of a wrong type. JSON schemas are
measured without recursion.

Of grammars (GBNF) and regular expressions, one pass counts everything that an engine recurses over
or multiplies: parentheses, alternatives, and consecutive optional parts. Before each token an
engine expands every stack to the next character, one after the other. Rules that reference one
another twice (`a ::= b b`, `b ::= c c` …, with an empty last one, or `a ::= b | b`) have 2^n
stacks. `most_stacks` computes the expansions of each rule once, from those of its parts.

Source: tools/server/server-common.cpp and server-task.cpp, and json_schema_to_grammar in
common/json-schema-to-grammar.cpp; grammars/README.md for the notation; llama_grammar_advance_stack
in src/llama-grammar.cpp of llama.cpp, build 10434; ECMAScript's regular expressions.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final
from urllib.parse import unquote

from proxy.common.toml_text import table_beside
from proxy.errors import BadRequest
from proxy.settings import RequestLimits
from proxy.upstream.endpoint_kinds import EndpointKind

STACKS_MAX: Final = 2**31 - 1
# Mutually recursive rules settle within this many rounds, or are left-recursive.
_ROUNDS_MAX: Final = 6
_REPEATS_MAX: Final = 32
# Deeper parentheses are not parsed but count as too many stacks.
_LEVELS_MAX: Final = 200
_GRAMMAR_TOKEN: Final = re.compile(
    r"""
      (?P<head>[\w-]++)\s*+::=
    | (?P<name>[\w-]++)
    | (?P<end>"(?:[^"\\]++|\\.)*+"? | \[(?:[^\]\\]++|\\.)*+\]? | \.)
    | \#[^\n]*+
    | (?P<operator>[()|?*+]) | \{(?P<least>\d{0,9}),?(?P<most>\d{0,9})\}
    """,
    re.VERBOSE | re.DOTALL,
)

# Expansions of a part to a next character, and to its end without one.
_Expansions = tuple[int, int]
_CHARACTER: Final[_Expansions] = (1, 0)


@dataclass(slots=True)
class Part:
    """A character (no name), a reference to a rule, or alternatives in parentheses; repeated."""

    name: str | int = ""
    alternatives: list[list[Part]] = field(default_factory=list)
    least: int = 1
    most: int = 1


Rules = dict[str | int, list[list[Part]]]

_LEFT_RECURSIVE: Final[Rules] = {"root": [[Part("root")], [Part()]]}


def most_stacks(rules: Rules) -> int:
    """Return the most parse stacks at once, from the alternatives of each rule."""
    known: dict[str | int, _Expansions] = dict.fromkeys(rules, (0, 0))
    order = _dependencies_first(rules)
    for _ in range(_ROUNDS_MAX):
        before, most = dict(known), 0
        for name in order:
            known[name], here = _expand_alternatives(rules[name], known)
            most = max(most, here)
        if most >= STACKS_MAX or known == before:
            return most
    return STACKS_MAX


def _parse_grammar(grammar: str) -> Rules:
    """Return the alternatives of each rule; the engine rejects invalid grammars."""
    rules: Rules = {}
    levels: list[list[list[Part]]] = [[[]]]
    for found in _GRAMMAR_TOKEN.finditer(grammar):
        if name := found["head"]:
            rules[name] = [[]]  # the last definition counts
            levels = [rules[name]]
        elif len(levels) > _LEVELS_MAX:
            return _LEFT_RECURSIVE
        else:
            _add(levels, found)
    return rules


def _add(levels: list[list[list[Part]]], found: re.Match[str]) -> None:
    alternatives = levels[-1]
    match found["operator"] or "":
        case "(":
            alternatives[-1].append(Part(alternatives=[[]]))
            levels.append(alternatives[-1][-1].alternatives)
        case ")":
            del levels[max(1, len(levels) - 1) :]
        case "|":
            alternatives.append([])
        case _ if found["end"] or found["name"]:
            if found["end"] != '""':
                alternatives[-1].append(Part(found["name"] or ""))
        case _ if alternatives[-1]:
            _repeat(alternatives[-1][-1], found)


def _repeat(part: Part, found: re.Match[str]) -> None:
    if operator := found["operator"]:
        part.least, part.most = {"?": (0, 1), "*": (0, _REPEATS_MAX)}.get(
            operator, (1, _REPEATS_MAX)
        )
    elif found["least"] is not None:
        part.least = int(found["least"] or 0)
        open_end = _REPEATS_MAX if "," in found[0] else part.least
        part.most = min(int(found["most"] or open_end), _REPEATS_MAX)


def _dependencies_first(rules: Rules) -> list[str | int]:
    """Return the rules, each after the rules that it references if possible."""
    order: dict[str | int, None] = {}
    begun: set[str | int] = set()
    todo = [(name, False) for name in rules]
    while todo:
        name, is_done = todo.pop()
        if is_done:
            order[name] = None
        elif name not in begun:
            begun.add(name)
            todo.append((name, True))
            todo += [
                (reference, False) for reference in _references(rules[name]) if reference in rules
            ]
    return list(order)


def _references(alternatives: list[list[Part]]) -> Iterator[str | int]:
    for part in (part for sequence in alternatives for part in sequence):
        if part.alternatives:
            yield from _references(part.alternatives)
        elif part.name:
            yield part.name


def _expand_alternatives(
    alternatives: list[list[Part]], known: Mapping[str | int, _Expansions]
) -> tuple[_Expansions, int]:
    """Return the expansions of alternatives, and the most from any position inside them."""
    first, empty, most = 0, 0, 0
    for sequence in alternatives:
        ahead, through = 0, 1
        for part in reversed(sequence):
            (own, none), inner = _expand_part(part, known)
            ahead, through = min(own + none * ahead, STACKS_MAX), min(none * through, STACKS_MAX)
            most = max(most, inner, ahead)
        first, empty = min(first + ahead, STACKS_MAX), min(empty + through, STACKS_MAX)
    return (first, empty), max(most, first)


def _expand_part(part: Part, known: Mapping[str | int, _Expansions]) -> tuple[_Expansions, int]:
    if part.alternatives:
        (first, empty), most = _expand_alternatives(part.alternatives, known)
    else:
        (first, empty), most = known.get(part.name, _CHARACTER), 0
    if part.least == part.most == 1:
        return (first, empty), most
    if part.most == 0:
        return (0, 1), most
    through = 1
    if empty:
        for _ in range(part.most):
            first, through = min(first * 2, STACKS_MAX), min(through * (empty + 1), STACKS_MAX)
    return (first, through if part.least == 0 or empty else 0), max(most, first)


# Quantifiers are possessive, so nothing backtracks and time is linear in the text.
_GRAMMAR: Final = re.compile(
    r'"(?:[^"\\]++|\\.)*+"?|\[(?:[^\]\\]++|\\.)*+\]?|#[^\n]*+|::=|[()|?*{]', re.DOTALL
)
_EXPRESSION: Final = re.compile(r"\\.|\[(?:[^\]\\]++|\\.)*+\]?|\(\?|[()|?*{]", re.DOTALL)


def _shapes(tokens: re.Pattern[str], text: str) -> Iterator[tuple[int, int, int, int]]:
    """Yield after each token: levels, rules, alternatives, the longest run of optional parts."""
    depth = rules = alternatives = optionals = count = 0
    open_counts: list[int] = []
    for found in tokens.finditer(text):
        match found[0]:
            case "(" | "(?":
                open_counts.append(count)
                count = 0
                depth = max(depth, len(open_counts))
            case ")":
                count = open_counts.pop() if open_counts else 0
            case "|":
                alternatives, count = alternatives + 1, 0
            case "::=":
                rules, count = rules + 1, 0
            case "?" | "*" | "{":
                count += 1
                optionals = max(optionals, count)
            case _:  # a literal, a character class, a comment
                continue
        yield depth, rules, alternatives, optionals


_ALTERNATIVES: Final = ("anyOf", "oneOf", "allOf")
_ROOTS: Final = frozenset({"schema", "json_schema", "parameters", "input_schema"})


def _rules_of(schema: object) -> Rules:
    """Return a rule for each schema object that has alternatives, by its `id`.

    References are resolved from the first member that contains a schema.
    """
    rules: Rules = {}
    todo: list[tuple[object, object]] = [(schema, schema)]
    while todo:
        value, root = todo.pop()
        if isinstance(value, dict) and (alternatives := _alternatives(value, root)):
            rules[id(value)] = alternatives
        for key, member in _items(value):
            if isinstance(member, dict | list):
                todo.append((member, member if root is schema and key in _ROOTS else root))
    return rules


def _alternatives(schema: Mapping[str, object], root: object) -> list[list[Part]]:
    """Return alternatives of a schema; its other members each begin with a distinct character."""
    found: list[object] = []
    for key in _ALTERNATIVES:
        if isinstance(many := schema.get(key), list):
            found += many
    if isinstance(path := schema.get("$ref"), str):
        # `json_schema` of a response contains the schema one level deeper.
        inner = root.get("schema") if isinstance(root, dict) else None
        targets = (_resolve(root, path), _resolve(inner, path))
        found += [target for target in targets if target is not None]
    return [[Part(id(target))] for target in found]


def _resolve(value: object, path: str) -> object:
    """Return the target of a reference such as `#/$defs/a`, or None. Source: RFC 6901."""
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


_TABLES: Final = table_beside(__file__)
_NUMBERS, _COUNTS = (
    {name: limit for limit, names in _TABLES[kind].items() for name in names}
    for kind in ("numbers", "counts")
)
_SCHEMAS: Final[Sequence[str]] = _TABLES["schemas"]
_INPUTS: Final = ("prompt", "input", "content", "documents", "texts")
_NUMERIC: Final = (int, float)
_CHECKED: Final = frozenset({*_NUMBERS, *_COUNTS, *_SCHEMAS, *_INPUTS, "grammar"})
# Values of `type` of a grammar trigger; an engine aborts on other numbers.
# Source: common/common.h of llama.cpp, common_grammar_trigger_type, build 10434.
_TOKEN, _WORD, _PATTERN, _PATTERN_FULL = range(4)


def check(kind: EndpointKind, members: Mapping[str, Any], limits: RequestLimits) -> None:
    """Check the members that the instance will read.

    Raises LimitExceeded, or BadRequest for a grammar trigger of unknown type. Also BadRequest for
    Anthropic `messages` that are empty or no list, because the engine would answer an empty prompt.
    """
    if kind is EndpointKind.MESSAGES and "messages" in members:
        messages = members["messages"]
        if not isinstance(messages, list) or not messages:
            raise BadRequest("messages must be a list of at least one message")
    if not (names := _CHECKED.intersection(members)):
        return
    has_others = False
    for name in names:
        if (limit := _NUMBERS.get(name)) is None:
            has_others = True
        elif isinstance(value := members[name], _NUMERIC):
            limits.enforce(name, "", value, limit)
    if has_others:
        _Checker(limits).check(kind, members)


class _Checker:
    """Checks the texts and lists of one request.

    Its schemas share their limits, and so do its regular expressions.
    """

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._enforce = limits.enforce
        self._pattern_chars = 0
        self._schema_values = 0

    def check(self, kind: EndpointKind, members: Mapping[str, Any]) -> None:
        for name in _COUNTS.keys() & members.keys():
            self._check_list(name, members[name])
        for name in _INPUTS if kind is EndpointKind.EMBED_OR_RERANK else ("prompt",):
            self._check_prompts(name, members.get(name))
        if isinstance(grammar := members.get("grammar"), str):
            self._enforce("grammar", "characters", len(grammar), "grammar_bytes")
            self._check_shape("grammar", _GRAMMAR, grammar)
            stacks = most_stacks(_parse_grammar(grammar))
            self._enforce("grammar", "parse stacks", stacks, "grammar_stacks")
        self._check_triggers(members.get("grammar_triggers"))
        for name in _SCHEMAS:
            if name in members:
                self._check_schema(name, members[name])

    def _check_list(self, name: str, value: object) -> None:
        if isinstance(value, str):
            # `stop` may be one string; each character of `samplers` is a sampler.
            if name == "samplers":
                self._enforce(name, "entries", len(value), "samplers")
            else:
                self._enforce(name, "characters", len(value), "text_chars")
        if isinstance(value, list | dict):
            self._enforce(name, "entries", len(value), _COUNTS[name])
            for member in value:  # a text, alone or first in a pair (a token and its bias)
                text = member[0] if isinstance(member, list) and member else member
                if isinstance(text, str):
                    self._enforce(name, "characters in one entry", len(text), "text_chars")

    def _check_prompts(self, name: str, value: object) -> None:
        most = self._limits.prompts
        if not isinstance(value, list) or len(value) <= most:
            return
        # A list with a number in it is a single prompt in tokens.
        if not any(isinstance(item, int) for item in islice(value, most + 1)):
            self._enforce(name, "prompts", len(value), "prompts")

    def _check_triggers(self, triggers: object) -> None:
        name, expressions = "grammar_triggers", 0
        for trigger in triggers if isinstance(triggers, list) else ():
            given = trigger if isinstance(trigger, dict) else {}
            kind, value = given.get("type"), given.get("value")
            if not isinstance(kind, int | float):
                continue
            if int(kind) not in range(_PATTERN_FULL + 1):
                raise BadRequest(f"{name}: type is {kind}; it must be 0 to {_PATTERN_FULL}")
            expressions += int(kind) >= _PATTERN
            self._enforce(name, "regular expressions", expressions, "trigger_patterns")
            if isinstance(value, str) and int(kind) == _WORD:
                self._enforce(name, "characters in one entry", len(value), "text_chars")
                self._count_pattern(name, value)
            elif isinstance(value, str) and int(kind) >= _PATTERN:
                self._check_pattern(name, value)

    def _count_pattern(self, member: str, text: str) -> None:
        """Count a text that an engine turns into a regular expression."""
        self._pattern_chars += len(text)
        unit = "characters of regular expressions"
        self._enforce(member, unit, self._pattern_chars, "pattern_bytes")

    def _check_pattern(self, member: str, text: str) -> None:
        self._count_pattern(member, text)
        self._check_shape(member, _EXPRESSION, text)

    def _check_shape(self, member: str, tokens: re.Pattern[str], text: str) -> None:
        for depth, rules, alternatives, optionals in _shapes(
            tokens, text
        ):  # until the first excess
            self._enforce(member, "levels of parentheses", depth, "grammar_depth")
            self._enforce(member, "rules", rules, "grammar_rules")
            self._enforce(member, "alternatives", alternatives, "grammar_alternatives")
            self._enforce(member, "consecutive optional parts", optionals, "grammar_optionals")

    def _check_schema(self, member: str, schema: object) -> None:
        """Measure a member that contains schemas."""
        todo: list[tuple[object, int]] = [(schema, 1)]
        while todo:
            value, depth = todo.pop()
            if isinstance(value, dict):
                self._check_object(member, value)
            inner = [inner for _, inner in _items(value)]
            self._schema_values += len(inner)
            self._enforce(member, "values in its schema", self._schema_values, "schema_values")
            self._enforce(member, "levels in its schema", depth, "schema_depth")
            todo += [(value, depth + 1) for value in inner if isinstance(value, dict | list)]
        stacks = most_stacks(_rules_of(schema))
        self._enforce(member, "parse stacks in its schema", stacks, "grammar_stacks")

    def _check_object(self, member: str, schema: Mapping[str, Any]) -> None:
        for name, value in schema.items():
            if isinstance(value, list) and name != "required":
                self._enforce(member, f"entries of {name[:40]}", len(value), "schema_choices")
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, dict):
            named = required if isinstance(required, list) else ()
            optional = len(properties.keys() - {name for name in named if isinstance(name, str)})
            unit = "optional properties of an object"
            self._enforce(member, unit, optional, "schema_optional")
        if isinstance(pattern := schema.get("pattern"), str):
            self._check_pattern(f"pattern in {member}", pattern)
