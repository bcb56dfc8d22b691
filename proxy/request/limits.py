"""Rejects requests that exceed `[proxy.limits]`. Time is linear in the request's size.

Only members that llama-server reads are checked, under all names that its endpoints know: OpenAI's,
Anthropic's and its own. The engine itself rejects members of a wrong type. JSON schemas are
measured without recursion.

Source: tools/server/server-common.cpp and server-task.cpp, and json_schema_to_grammar in
common/json-schema-to-grammar.cpp of llama.cpp, build 10434.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import unquote

from proxy.errors import BadRequest
from proxy.request.grammar import Part, Patterns, Rules, check_grammar, most_stacks
from proxy.settings import RequestLimits
from proxy.upstream.endpoint_kinds import EndpointKind

_ALTERNATIVES: Final = ("anyOf", "oneOf", "allOf")
_ROOTS: Final = frozenset({"schema", "json_schema", "parameters", "input_schema"})


class Schemas:
    """The JSON schemas of one request, which share their limits."""

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
            values = len(inner)
            self._values += values
            self._limits.enforce(member, "values in its schema", self._values, "schema_values")
            self._limits.enforce(member, "levels in its schema", depth, "schema_depth")
            todo += [(value, depth + 1) for value in inner if isinstance(value, dict | list)]
        stacks = most_stacks(_rules_of(schema))
        self._limits.enforce(member, "parse stacks in its schema", stacks, "grammar_stacks")

    def _check_object(self, member: str, schema: Mapping[str, Any]) -> None:
        for name, value in schema.items():
            if isinstance(value, list) and name != "required":
                unit = f"entries of {name[:40]}"
                self._limits.enforce(member, unit, len(value), "schema_choices")
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, dict):
            named = required if isinstance(required, list) else ()
            optional = len(properties.keys() - {name for name in named if isinstance(name, str)})
            unit = "optional properties of an object"
            self._limits.enforce(member, unit, optional, "schema_optional")
        pattern = schema.get("pattern")
        if isinstance(pattern, str):
            self._patterns.check(f"pattern in {member}", pattern)


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


# Members with a number, and the limit on its value.
_NUMBERS: Final = MappingProxyType(
    {
        "n_predict": "n_predict",
        "max_tokens": "n_predict",
        "max_completion_tokens": "n_predict",
        "max_output_tokens": "n_predict",
        "repeat_last_n": "last_n",
        "dry_penalty_last_n": "last_n",
        "n": "answers",
        "n_cmpl": "answers",
        "best_of": "answers",
        "n_probs": "n_probs",
        "top_logprobs": "n_probs",
        "logprobs": "n_probs",
    }
)
# Members with a list or an object, and the limit on its length.
_COUNTS: Final = MappingProxyType(
    {
        "stop": "stop",
        "stop_sequences": "stop",
        "logit_bias": "logit_bias",
        "dry_sequence_breakers": "dry_sequence_breakers",
        "samplers": "samplers",
        "lora": "lora",
        "grammar_triggers": "triggers",
        "preserved_tokens": "triggers",
    }
)
_SCHEMAS: Final = (
    "json_schema",
    "response_format",
    "tools",
    "functions",
    "text",
    "output_format",
    "output_config",
)
_INPUTS: Final = ("prompt", "input", "content", "documents", "texts")
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
    if not _CHECKED.isdisjoint(members):
        _check(kind, members, limits)


def _check(kind: EndpointKind, members: Mapping[str, Any], limits: RequestLimits) -> None:
    patterns = Patterns(limits)
    for name in _NUMBERS.keys() & members.keys():
        if isinstance(members[name], int | float):
            limits.enforce(name, "", members[name], _NUMBERS[name])
    for name in _COUNTS.keys() & members.keys():
        _check_list(limits, name, members[name])
    for name in _INPUTS if kind is EndpointKind.EMBED_OR_RERANK else ("prompt",):
        _check_prompts(limits, name, members.get(name))
    if isinstance(grammar := members.get("grammar"), str):
        check_grammar(limits, "grammar", grammar)
    _check_triggers(limits, patterns, members.get("grammar_triggers"))
    schemas = Schemas(limits, patterns)
    for name in _SCHEMAS:
        if name in members:
            schemas.check(name, members[name])


def _check_list(limits: RequestLimits, name: str, value: object) -> None:
    if isinstance(value, str):
        # `stop` may be one string; each character of `samplers` is one of them.
        if name == "samplers":
            limits.enforce(name, "entries", len(value), "samplers")
        else:
            limits.enforce(name, "characters", len(value), "text_chars")
    if isinstance(value, list | dict):
        limits.enforce(name, "entries", len(value), _COUNTS[name])
        for text in _texts(value):
            limits.enforce(name, "characters in one entry", len(text), "text_chars")


def _texts(value: list[Any] | dict[str, Any]) -> Iterable[str]:
    """Yield the strings of a list, alone or first in a pair (a token and its bias)."""
    for member in value:
        text = member[0] if isinstance(member, list) and member else member
        if isinstance(text, str):
            yield text


def _check_prompts(limits: RequestLimits, name: str, value: object) -> None:
    if not isinstance(value, list) or len(value) <= limits.prompts:
        return
    # A list with a number in it is a single prompt in tokens.
    if not any(isinstance(item, int) for item in islice(value, limits.prompts + 1)):
        limits.enforce(name, "prompts", len(value), "prompts")


def _check_triggers(limits: RequestLimits, patterns: Patterns, triggers: object) -> None:
    name, expressions = "grammar_triggers", 0
    for trigger in triggers if isinstance(triggers, list) else ():
        kind, value = (
            (trigger.get("type"), trigger.get("value"))
            if isinstance(trigger, dict)
            else (None, None)
        )
        if not isinstance(kind, int | float):
            continue
        if int(kind) not in range(_PATTERN_FULL + 1):
            raise BadRequest(f"{name}: type is {kind}; it must be 0 to {_PATTERN_FULL}")
        expressions += int(kind) >= _PATTERN
        limits.enforce(name, "regular expressions", expressions, "trigger_patterns")
        if isinstance(value, str) and int(kind) == _WORD:
            limits.enforce(name, "characters in one entry", len(value), "text_chars")
            patterns.count(name, value)
        elif isinstance(value, str) and int(kind) >= _PATTERN:
            patterns.check(name, value)
