"""Requests that would crash or stall an engine are rejected; realistic ones pass."""

from collections.abc import Callable
from typing import Any

import pytest
from support.growth import FACTOR, is_linear
from support.proxy_harness import ProxyHarness

from proxy.errors import BadRequest, LimitExceeded
from proxy.request.limits import check
from proxy.settings import RequestLimits
from proxy.upstream.endpoint_kinds import EndpointKind

SIZE = 1000
LIMITS = RequestLimits()
ANYTHING = LIMITS.model_copy(update=dict.fromkeys(RequestLimits.model_fields, 2**63))


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}}


def chained(count: int) -> str:
    rules = "\n".join(f"r{i} ::= r{i + 1}" for i in range(count))
    return f'root ::= r0\n{rules}\nr{count} ::= "a"'


def doubled(count: int, text: str, last: str) -> str:
    """Rules each of which references the next one twice."""
    rules = "\n".join(f"r{i} ::= " + text.format(f"r{i + 1}") for i in range(count))
    return f'root ::= "b" r0\n{rules}\nr{count} ::= {last}'


def doubled_schema(count: int) -> dict[str, Any]:
    each = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**each, f"d{count}": {"type": "integer"}}}


def tool(schema: object) -> list[object]:
    return [{"type": "function", "function": {"name": "f", "parameters": schema}}]


def answer(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def trigger(value: str, kind: float = 2) -> list[object]:
    return [{"type": kind, "value": value}]


PARENTHESES = "(" * 100_000 + "a" + ")" * 100_000
PATTERN = {"type": "string", "pattern": f"^{'(' * 8000}a{')' * 8000}$"}

# Requests that crashed build 10434 or kept it busy, and much larger ones than are realistic.
TOO_MUCH: dict[str, tuple[dict[str, Any], str]] = {
    "parentheses": ({"grammar": f"root ::= {PARENTHESES}"}, "grammar_bytes"),
    "some parentheses": ({"grammar": f"root ::= {'(' * 200}a{')' * 200}"}, "grammar_depth"),
    "chained rules": ({"grammar": chained(100_000)}, "grammar_bytes"),
    "short chained rules": ({"grammar": "a::=b\n" * 5000}, "grammar_rules"),
    "alternatives": ({"grammar": "root ::= " + "|".join(["a"] * 3000)}, "grammar_alternatives"),
    "optional parts": ({"grammar": 'root ::= "a" ' + "x? " * 100}, "grammar_optionals"),
    "optional groups": ({"grammar": "root ::= " + '("a")* ' * 100}, "grammar_optionals"),
    "doubled rules": ({"grammar": doubled(18, "{0} | {0}", '"a"')}, "grammar_stacks"),
    "doubled empty rules": ({"grammar": doubled(18, "{0} {0}", '"a" | ""')}, "grammar_stacks"),
    "stacks of a schema": ({"json_schema": doubled_schema(40)}, "grammar_stacks"),
    "stacks of a tool": ({"tools": tool(doubled_schema(40))}, "grammar_stacks"),
    "stacks of a response": ({"response_format": answer(doubled_schema(40))}, "grammar_stacks"),
    "left recursion": ({"grammar": 'root ::= root "a" | "b"'}, "grammar_stacks"),
    "pattern": ({"json_schema": PATTERN}, "grammar_depth"),
    "pattern in a tool": ({"tools": tool({"properties": {"a": PATTERN}})}, "grammar_depth"),
    "pattern in an answer": ({"response_format": answer(PATTERN)}, "grammar_depth"),
    "long pattern": ({"json_schema": {"pattern": "a" * 20_000}}, "pattern_bytes"),
    "many patterns": ({"json_schema": {"anyOf": [{"pattern": "a" * 99}] * 999}}, "pattern_bytes"),
    "optional pattern": ({"json_schema": {"pattern": "a?" * 100}}, "grammar_optionals"),
    # Kept an engine busy for two minutes.
    "trigger": ({"grammar_triggers": trigger("(a*)*" * 20 + "b")}, "trigger_patterns"),
    "full trigger": ({"grammar_triggers": trigger("a", 3.5)}, "trigger_patterns"),
    "long word": ({"grammar_triggers": trigger("(" * 50_000, 1)}, "text_chars"),
    "many words": ({"grammar_triggers": trigger("(" * 4000, 1) * 9}, "pattern_bytes"),
    "triggers": ({"grammar_triggers": trigger("a", 1) * 2000}, "triggers"),
    "preserved tokens": ({"preserved_tokens": ["a"] * 2000}, "triggers"),
    "optional properties": ({"json_schema": optional(2000)}, "schema_optional"),
    "of a tool": ({"tools": tool(optional(2000))}, "schema_optional"),
    "of Anthropic's tool": ({"tools": [{"input_schema": optional(2000)}]}, "schema_optional"),
    "of a response": ({"text": {"format": {"schema": optional(2000)}}}, "schema_optional"),
    "levels": ({"json_schema": nested(400)}, "schema_depth"),
    "enum": ({"json_schema": {"enum": list(range(3000))}}, "schema_choices"),
    "types": ({"json_schema": {"type": ["string"] * 3000}}, "schema_choices"),
    "values": ({"json_schema": {"allOf": [{"enum": [1] * 1000}] * 100}}, "schema_values"),
    "stop": ({"stop": ["a"] * 1000}, "stop"),
    "one long stop": ({"stop": "a" * 10_000}, "text_chars"),
    "long stop": ({"stop": ["a" * 10_000]}, "text_chars"),
    "Anthropic's stop": ({"stop_sequences": ["a"] * 1000}, "stop"),
    "logit_bias": ({"logit_bias": [[i, 1] for i in range(20_000)]}, "logit_bias"),
    "logit_bias as an object": ({"logit_bias": {str(i): 1 for i in range(20_000)}}, "logit_bias"),
    "text of logit_bias": ({"logit_bias": [["a" * 5000, 1]]}, "text_chars"),
    "n_predict": ({"n_predict": 10**12}, "n_predict"),
    "max_tokens": ({"max_tokens": 1e12}, "n_predict"),
    "max_completion_tokens": ({"max_completion_tokens": 2**63}, "n_predict"),
    "max_output_tokens": ({"max_output_tokens": 2**63}, "n_predict"),
    "repeat_last_n": ({"repeat_last_n": 10**9}, "last_n"),
    "dry_penalty_last_n": ({"dry_penalty_last_n": 10**9}, "last_n"),
    "breakers": ({"dry_sequence_breakers": ["a"] * 100}, "dry_sequence_breakers"),
    "samplers": ({"samplers": ["top_k"] * 100}, "samplers"),
    "samplers as letters": ({"samplers": "k" * 100}, "samplers"),
    "lora": ({"lora": [{"id": i} for i in range(100)]}, "lora"),
    "prompts": ({"prompt": ["a"] * 3000}, "prompts"),
    "n": ({"n": 100}, "answers"),
    "n_cmpl": ({"n_cmpl": 100}, "answers"),
    "n_probs": ({"n_probs": 10**6}, "n_probs"),
    "top_logprobs": ({"logprobs": True, "top_logprobs": 10**6}, "n_probs"),
    "logprobs": ({"logprobs": 10**6}, "n_probs"),
}

# Source: grammars/json.gbnf of llama.cpp.
JSON_GRAMMAR = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""

FINE: dict[str, dict[str, Any]] = {
    "JSON": {"grammar": JSON_GRAMMAR},
    "expressions": {
        "grammar": 'root ::= (e "=" w t)+\ne ::= t ([-+] t)*\nt ::= [a-z]+ w\nw ::= " "*'
    },
    "rules one after the other": {"grammar": chained(3000)},
    "a list in a list": {"json_schema": {"items": {"$ref": "#"}, "type": "array"}},
    "references": {
        "json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"type": "null"}] * 9}}}
    },
    "literals": {"grammar": r'root ::= "((((\"((((" [(((\]((] # ((((' + "(" * 500 + '\na ::= "a"'},
    "escapes": {"json_schema": {"pattern": r"\(" * 500 + "[(((]"}},
    "groups": {"json_schema": {"pattern": "(?:a|b)" * 100}},
    "a hundred tools": {"tools": tool(optional(30)) * 100},
    "required properties": {
        "json_schema": optional(2000) | {"required": [f"p{i}" for i in range(2000)]}
    },
    "200 countries": {"json_schema": {"enum": ["country"] * 200}},
    "a prompt in tokens": {"prompt": list(range(100_000))},
    "to the end": {"n_predict": -1, "max_tokens": 2**31 - 1, "repeat_last_n": -1},
    "words and tokens that trigger": {"grammar_triggers": trigger("<a>", 1) + trigger("", 0)},
    "other types": {
        "grammar": 1,
        "stop": None,
        "logit_bias": "a",
        "n": "a",
        "tools": "a",
        "prompt": {"a": 1},
        "grammar_triggers": [1, {"type": [], "value": "a"}],
        "json_schema": {"properties": [], "required": [[]], "pattern": 1},
    },
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_excess_is_rejected_and_the_message_names_the_limit(name: str) -> None:
    members, setting = TOO_MUCH[name]
    with pytest.raises(LimitExceeded) as refused:
        check(EndpointKind.LLAMA_COMPLETION, members, LIMITS)
    assert f"raise {setting} under [proxy.limits]" in refused.value.message
    assert str(getattr(LIMITS, setting)) in refused.value.message
    check(EndpointKind.LLAMA_COMPLETION, members, ANYTHING)


@pytest.mark.parametrize("name", FINE)
def test_realistic_requests_pass(name: str) -> None:
    check(EndpointKind.LLAMA_COMPLETION, FINE[name], LIMITS)


def test_parentheses_too_deep_to_parse_exceed_grammar_stacks() -> None:
    some = RequestLimits(grammar_depth=10_000)
    with pytest.raises(LimitExceeded, match="grammar_stacks"):
        check(
            EndpointKind.LLAMA_COMPLETION,
            {"grammar": "root ::= " + "(" * 300 + '"a"' + ")" * 300},
            some,
        )


def test_inputs_are_limited_where_each_is_computed() -> None:
    many = {"input": ["a"] * 3000}
    with pytest.raises(LimitExceeded):
        check(EndpointKind.EMBED_OR_RERANK, many, LIMITS)
    check(EndpointKind.RESPONSES, many, LIMITS)


@pytest.mark.parametrize("kind", [4, 9, -1, 2**40, 9.5])
def test_a_trigger_type_that_aborts_an_engine_is_rejected(kind: float) -> None:
    with pytest.raises(BadRequest, match="type"):
        check(EndpointKind.LLAMA_COMPLETION, {"grammar_triggers": trigger("a", kind)}, LIMITS)


def test_allowed_expressions_are_still_bounded() -> None:
    some = RequestLimits(trigger_patterns=2)
    check(EndpointKind.LLAMA_COMPLETION, {"grammar_triggers": trigger("a") * 2}, some)
    for value, setting in (("(" * 200, "grammar_depth"), ("a" * 20_000, "pattern_bytes")):
        with pytest.raises(LimitExceeded, match=setting):
            check(EndpointKind.LLAMA_COMPLETION, {"grammar_triggers": trigger(value)}, some)


def test_every_limit_is_tested() -> None:
    assert {setting for _, setting in TOO_MUCH.values()} == set(RequestLimits.model_fields)


LARGE: dict[str, Callable[[int], dict[str, Any]]] = {
    "quotes": lambda size: {"grammar": '"' * size},
    "brackets": lambda size: {"grammar": "[" * size},
    "escapes": lambda size: {"grammar": '"\\' * size},
    "pattern": lambda size: {"json_schema": {"pattern": "[\\" * size}},
    "enum": lambda size: {"json_schema": {"enum": [[[1]]] * size}},
    "tools": lambda size: {"tools": [{"pattern": "("} for _ in range(size)]},
    "stop": lambda size: {"stop": ["a"] * size},
    "chained rules": lambda size: {"grammar": chained(size)},
    "doubled schema": lambda size: {"json_schema": doubled_schema(size)},
}


@pytest.mark.parametrize("name", LARGE)
def test_time_is_linear_in_the_size(name: str) -> None:
    sizes = {size: LARGE[name](size) for size in (SIZE, FACTOR * SIZE)}
    assert is_linear(lambda size: check(EndpointKind.LLAMA_COMPLETION, sizes[size], ANYTHING), SIZE)


async def test_the_client_gets_400_and_no_engine_gets_the_request(proxy: ProxyHarness) -> None:
    fake = await proxy.fake()
    async with proxy.ask(grammar=f"root ::= {'(' * 10_000}") as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert error["code"] == "limit_exceeded"
    assert error["type"] == "invalid_request_error"
    assert error["message"] == (
        "grammar has 129 levels of parentheses, more than 128; "
        "send less, or raise grammar_depth under [proxy.limits]"
    )
    assert fake.calls.empty()


async def test_limits_apply_to_the_prompt_of_a_warm_up(proxy: ProxyHarness) -> None:
    path, body = "/corral/v1/models/chat/warm", {"messages": [], "grammar": "(" * 10_000}
    async with proxy.http.post(path, json=body) as response:
        assert response.status == 400
    assert not proxy.reader.asked
