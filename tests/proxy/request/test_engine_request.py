"""Requests of the Responses API are rewritten for the engine."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.request.engine_members import engine_members

SCHEMA = {"type": "object"}
FORMAT = {"type": "json_schema", "name": "a", "strict": True, "schema": SCHEMA}
RESPONSE_FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "a", "strict": True, "schema": SCHEMA},
}
ANSWER = {"role": "assistant", "content": "hello"}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]}
FUNCTION = {"type": "function", "name": "f", "parameters": {}}


@pytest.mark.parametrize(
    "members",
    [
        {"input": "hello"},
        {"input": [{"role": "user", "content": "hello"}, THOUGHT], "tools": [FUNCTION]},
        {"input": "a", "text": {"format": {"type": "text"}, "verbosity": "low"}},
        {"input": 3, "tools": 4, "text": 5},
        {"input": [1, "a", None], "tools": [1, {}, {"type": 2}], "text": {"format": 3}},
    ],
)
def test_what_the_engine_reads_stays_the_same_object(members: dict[str, Any]) -> None:
    assert engine_members(members) is members


@pytest.mark.parametrize(
    ("given", "asked"),
    [(FORMAT, RESPONSE_FORMAT), ({"type": "json_object"}, {"type": "json_object"})],
)
def test_a_format_is_the_chat_apis(given: dict[str, Any], asked: dict[str, Any]) -> None:
    members = {"input": "a", "text": {"format": given}}
    assert engine_members(members) == {**members, "response_format": asked}


def test_the_engines_own_member_comes_first() -> None:
    members = {"text": {"format": FORMAT}, "response_format": {"type": "text"}}
    assert engine_members(members) is members


def test_what_the_engine_refuses_is_left_out_or_completed() -> None:
    items = [ANSWER, {"type": "reasoning", "summary": [{"text": "a"}]}, THOUGHT]
    assert engine_members({"input": items})["input"] == [{**ANSWER, "type": "message"}, THOUGHT]
    tools = [{"type": "web_search"}, FUNCTION]
    assert engine_members({"tools": tools})["tools"] == [FUNCTION]


def test_a_member_that_is_null_is_not_given() -> None:
    assert engine_members({"input": "a", "instructions": None}) == {"input": "a"}
