"""Rejects requests that exceed `[proxy.limits]`. Time is linear in the request's size.

Only members that llama-server reads are checked, under every name that its endpoints have for them:
OpenAI's, Anthropic's and its own. The engine itself rejects members of a wrong type.

Source: tools/server/server-common.cpp and server-task.cpp of llama.cpp, build 10434.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any, Final

from proxy.endpoints import EndpointKind
from proxy.errors import BadRequest
from proxy.request_limits.grammar import Patterns, check_grammar
from proxy.request_limits.json_schema import Schemas
from proxy.request_limits.limits import RequestLimits

# Members with a number, and the limit of its value.
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
# Members with a list or an object, and the limit of its length.
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
    """Check a body as the instance will read it.

    Raises LimitExceeded, or BadRequest for a grammar trigger of unknown type, and for messages of
    Anthropic's API that are no list, or an empty one: the engine answers an empty prompt.
    """
    if kind is EndpointKind.MESSAGES and "messages" in members:
        _check_messages(members["messages"])
    if not _CHECKED.isdisjoint(members):
        _check(kind, members, limits)


def _check_messages(messages: object) -> None:
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list of at least one message")


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
    """The strings of a list, alone or first in a pair (a token and its bias)."""
    for one in value:
        text = one[0] if isinstance(one, list) and one else one
        if isinstance(text, str):
            yield text


def _check_prompts(limits: RequestLimits, name: str, value: object) -> None:
    if not isinstance(value, list) or len(value) <= limits.prompts:
        return
    # A list with a number in it is a single prompt in tokens.
    if not any(isinstance(one, int) for one in islice(value, limits.prompts + 1)):
        limits.enforce(name, "prompts", len(value), "prompts")


def _check_triggers(limits: RequestLimits, patterns: Patterns, triggers: object) -> None:
    name, expressions = "grammar_triggers", 0
    for one in triggers if isinstance(triggers, list) else ():
        kind, value = (one.get("type"), one.get("value")) if isinstance(one, dict) else (None, None)
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
