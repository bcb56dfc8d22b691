"""Arguments that schemas of tools allow, and broken calls of a history."""

import json
from typing import Any

import orjson
import pytest

from proxy.request.tools import Tools, with_mended_calls
from proxy.upstream.endpoint_kinds import EndpointKind

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
GOOD = '{"city": "Rome"}'


def history(arguments: str) -> list[dict[str, Any]]:
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "a", "type": "function", "function": function}
    return [
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "warm"},
    ]


def test_a_history_is_repaired_alike_in_each_turn() -> None:
    broken = ['{"city": "Ro', "{'city': 'Rome'}", "", "Rome", '{"a": "\\ud8', "[" * 5000]
    whole = {"messages": [turn for text in broken for turn in history(text)]}
    members, count = with_mended_calls(EndpointKind.CHAT, whole)
    assert count == len(broken)
    for turns in range(1, len(broken)):
        part = {"messages": whole["messages"][: 3 * turns]}
        mended, _ = with_mended_calls(EndpointKind.CHAT, part)
        assert mended["messages"] == members["messages"][: 3 * turns]
    arguments = [
        orjson.loads(turn["tool_calls"][0]["function"]["arguments"])
        for turn in members["messages"]
        if "tool_calls" in turn
    ]
    assert arguments[1:4] == [{"city": "Rome"}, {}, {"unparsed": "Rome"}]


def test_of_a_history_a_bounded_number_of_characters_is_read_leniently() -> None:
    long = "{'city': '" + "R" * 30_000 + "'}"
    members = {"messages": [turn for _ in range(3) for turn in history(long)]}
    mended, count = with_mended_calls(EndpointKind.CHAT, members)
    calls = [turn["tool_calls"][0] for turn in mended["messages"] if "tool_calls" in turn]
    read = [list(orjson.loads(call["function"]["arguments"])) for call in calls]
    assert (count, read) == (3, [["city"], ["city"], ["unparsed"]])


def test_only_calls_of_the_assistant_are_repaired() -> None:
    (_, call, result) = history("{")
    others = [{**call, "role": "user"}, {**result, "content": "{"}]
    members = {"messages": others, "input": [{"type": "function_call_output", "arguments": "{"}]}
    for kind in EndpointKind:
        assert with_mended_calls(kind, members) == (members, 0)
    items = [{"type": "function_call", "name": "weather", "arguments": "{'city': 'Rome'}"}]
    mended, count = with_mended_calls(EndpointKind.RESPONSES, {"input": items})
    assert (mended["input"][0]["arguments"], count) == ('{"city":"Rome"}', 1)


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "http://127.0.0.1:9/schema"},
        {"type": "text"},
        {"properties": {"city": {"pattern": "(?=a)"}}},
        5,
        {"$ref": "#/$defs/none"},
    ],
)
def test_a_schema_that_is_none_allows_any_object(schema: object) -> None:
    tools = Tools({"tools": [{"type": "function", "name": "weather", "parameters": schema}]})
    assert tools.mend("weather", GOOD, is_cut=False) == (GOOD, "")
    assert "no JSON object" in tools.mend("weather", "[]", is_cut=False)[1]


def test_a_pattern_takes_linear_time() -> None:
    schema = {"properties": {"city": {"pattern": "^(a+)+$"}}}
    tools = Tools({"tools": [{"type": "function", "name": "weather", "parameters": schema}]})
    text = json.dumps({"city": "a" * 50_000 + "b"})
    assert "city" in tools.mend("weather", text, is_cut=False)[1]


def test_a_tool_that_the_request_lacks_is_a_fault() -> None:
    assert "no tool" in Tools({"tools": TOOLS}).mend("wether", GOOD, is_cut=False)[1]
