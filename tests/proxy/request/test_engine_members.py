"""A choice that names tools, in the engine's words."""

from typing import Any

import pytest

from proxy.request.engine_members import with_chosen_tools
from proxy.upstream.endpoint_kinds import EndpointKind

CHAT, RESPONSES, MESSAGES = EndpointKind.CHAT, EndpointKind.RESPONSES, EndpointKind.MESSAGES


def tool(kind: EndpointKind, name: str) -> dict[str, Any]:
    match kind:
        case EndpointKind.CHAT:
            return {"type": "function", "function": {"name": name}}
        case EndpointKind.RESPONSES:
            return {"type": "function", "name": name}
    return {"name": name}


def members(kind: EndpointKind, choice: object) -> dict[str, Any]:
    return {"tools": [tool(kind, name) for name in "fgh"], "tool_choice": choice}


@pytest.mark.parametrize(
    ("kind", "choice", "mode"),
    [
        (CHAT, {"type": "function", "function": {"name": "g"}}, "required"),
        (RESPONSES, {"type": "function", "name": "g"}, "required"),
        (MESSAGES, {"type": "tool", "name": "g"}, {"type": "tool", "name": "g"}),
    ],
)
def test_a_function_that_is_named_is_the_only_one(
    kind: EndpointKind, choice: object, mode: object
) -> None:
    chosen = with_chosen_tools(kind, members(kind, choice))
    assert chosen == {"tools": [tool(kind, "g")], "tool_choice": mode}


@pytest.mark.parametrize("mode", ["auto", "required"])
@pytest.mark.parametrize("kind", [CHAT, RESPONSES])
def test_of_allowed_tools_any_may_be_called(kind: EndpointKind, mode: str) -> None:
    allowed = {"mode": mode, "tools": [tool(kind, "h"), tool(kind, "f")]}
    choice: dict[str, Any] = {"type": "allowed_tools"}
    choice |= {"allowed_tools": allowed} if kind is CHAT else allowed
    chosen = with_chosen_tools(kind, members(kind, choice))
    assert chosen == {"tools": [tool(kind, "f"), tool(kind, "h")], "tool_choice": mode}


@pytest.mark.parametrize("kind", [CHAT, RESPONSES, MESSAGES])
@pytest.mark.parametrize(
    "choice",
    [
        {},
        {"type": "auto"},
        {"type": "any"},
        {"type": "function"},
        {"type": "function", "name": "x", "function": {"name": "x"}},
        {"type": "tool", "name": ["g"]},
        {"type": "allowed_tools", "mode": "x", "tools": [{"name": "g"}]},
        {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [1]}},
    ],
)
def test_another_choice_is_left_to_the_engine(kind: EndpointKind, choice: object) -> None:
    given = members(kind, choice)
    assert with_chosen_tools(kind, given) is given


def test_tools_that_are_no_list_are_left_to_the_engine() -> None:
    given = {"tools": 3, "tool_choice": {"type": "function", "name": "g"}}
    assert with_chosen_tools(RESPONSES, given) is given
