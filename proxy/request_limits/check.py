"""Whether a request asks too much of an engine. Pure; time grows with the request's size.

Only what llama-server reads is looked at, under every name that its pages have for it: OpenAI's,
Anthropic's and its own. What has another type than it should is left to the engine's own refusal.

Source: tools/server/server-common.cpp and server-task.cpp of llama.cpp, build 10434.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Any, Final

from proxy.endpoints import EndpointKind
from proxy.errors import BadRequest
from proxy.request_limits.limit import Limit
from proxy.request_limits.limits import RequestLimits
from proxy.request_limits.schema import Schemas
from proxy.request_limits.text import Patterns, check_grammar

# Members whose value is a number, with its limit.
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
# Members that hold many, with the limit of how many.
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
_PROMPTS: Final = ("prompt",)
_INPUTS: Final = ("prompt", "input", "content", "documents", "texts")
# Values of `type` of a trigger; an engine aborts on any other number.
# Source: common/common.h of llama.cpp, common_grammar_trigger_type, build 10434.
_TOKEN, _WORD, _PATTERN, _PATTERN_FULL = range(4)


def check(kind: EndpointKind, members: Mapping[str, Any], limits: RequestLimits) -> None:
    """Refuse a request that asks too much.

    Args:
        kind: What it makes an instance do.
        members: Its body as the instance will read it.
        limits: What it may hold at most.

    Raises:
        LimitExceeded: It holds more; the first excess is named.
        BadRequest: A trigger is of a type that no engine knows.
    """
    limit = Limit(limits)
    patterns = Patterns(limit)
    for name in _NUMBERS.keys() & members.keys():
        if isinstance(members[name], int | float):
            limit(name, "", members[name], _NUMBERS[name])
    for name in _COUNTS.keys() & members.keys():
        _check_list(limit, name, members[name])
    for name in _INPUTS if kind is EndpointKind.EMBED_OR_RERANK else _PROMPTS:
        _check_prompts(limit, name, members.get(name), limits.prompts)
    if isinstance(grammar := members.get("grammar"), str):
        check_grammar(limit, "grammar", grammar)
    _check_triggers(limit, patterns, members.get("grammar_triggers"))
    schemas = Schemas(limit, patterns)
    for name in _SCHEMAS:
        if name in members:
            schemas.check(name, members[name])


def _check_list(limit: Limit, name: str, value: object) -> None:
    if isinstance(value, str):
        # `stop` may be one text; `samplers` one character for each.
        many = name == "samplers"
        limit(name, "entries" if many else "characters", len(value), _text_setting(name))
    if isinstance(value, list | dict):
        limit(name, "entries", len(value), _COUNTS[name])
        for text in _texts(value):
            limit(name, "characters in one entry", len(text), "text_chars")


def _text_setting(name: str) -> str:
    return "samplers" if name == "samplers" else "text_chars"


def _texts(value: list[Any] | dict[str, Any]) -> Iterable[str]:
    """Return the texts of a list, and those that stand first in its pairs."""
    for one in value:
        if isinstance(one, list) and one:
            one = one[0]  # noqa: PLW2901 (a pair: the token, then its bias)
        if isinstance(one, str):
            yield one


def _check_prompts(limit: Limit, name: str, value: object, most: int) -> None:
    """Refuse a list of too many prompts; one with a number in it is a single prompt in tokens."""
    if not isinstance(value, list) or len(value) <= most:
        return
    if not any(isinstance(one, int) for one in islice(value, most + 1)):
        limit(name, "prompts", len(value), "prompts")


def _check_triggers(limit: Limit, patterns: Patterns, triggers: object) -> None:
    expressions = 0
    for one in triggers if isinstance(triggers, list) else ():
        kind, value = (one.get("type"), one.get("value")) if isinstance(one, dict) else (None, None)
        if not isinstance(kind, int | float):
            continue
        if int(kind) not in range(_PATTERN_FULL + 1):
            raise BadRequest(f"grammar_triggers: type is {kind}; it must be 0 to {_PATTERN_FULL}")
        expressions += int(kind) >= _PATTERN
        limit("grammar_triggers", "regular expressions", expressions, "trigger_patterns")
        if isinstance(value, str) and int(kind) == _WORD:
            limit("grammar_triggers", "characters in one entry", len(value), "text_chars")
            patterns.count("grammar_triggers", value)
        elif isinstance(value, str) and int(kind) >= _PATTERN:
            patterns.check("grammar_triggers", value)
