"""Requests of every shape that changes the form of an answer, as hypothesis strategies.

A shape is a path and the members of the body, but for `stream`. Temperature is 0 and the cache is
off unless a shape says otherwise, so the same request has the same answer twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hypothesis import strategies as st

CHAT: Final = "/v1/chat/completions"
TEXT: Final = "/v1/completions"
MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"
NATIVE: Final = "/completion"

Shape = tuple[str, dict[str, Any]]

_PARAMETERS: Final = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
}
_FUNCTION: Final = {"name": "weather", "description": "Weather", "parameters": _PARAMETERS}
_SCHEMA: Final = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}
_GRAMMARS: Final = (
    'root ::= "a b c d e"',
    'root ::= "<think>\\nok so\\n</think>\\n\\nhello"',
    'root ::= "aä🦙b"',
    'root ::= "🦙"',
    'root ::= "a"',
    (
        r'root ::= "<tool_call>\n{\"name\": \"weather\", \"arguments\": "'
        r' "{\"city\": \"Rome\"}}\n</tool_call>"'
    ),
)
_HELLO: Final = {"role": "user", "content": "Say hello"}
_PREFILLS: Final[tuple[dict[str, Any], ...]] = (
    {"content": '{"capital": '},
    {"content": "Hello "},
    {"content": "ä🦙"},
    {"content": ""},
    {"content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
    {"content": "<think>\nI see"},
    {"content": "<think>\nI see\n</think>\n\nSo"},
    {"content": "", "reasoning_content": "I think"},
    {"content": "So", "reasoning_content": "I think"},
    {"content": None, "reasoning_content": "I think"},
    {
        "content": None,
        "tool_calls": [
            {
                "id": "a",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
            }
        ],
    },
)


def maybe(**members: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return members of which each is there or not."""
    return st.fixed_dictionaries({}, optional=members)


def _one_of(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


_SAMPLING: Final = {
    "seed": _one_of(1, 7),
    "cache_prompt": st.booleans(),
    "timings_per_token": st.booleans(),
    "return_progress": st.booleans(),
    "verbose": st.booleans(),
    "ignore_eos": st.booleans(),
    "return_tokens": st.booleans(),
    "logit_bias": _one_of([[5, 1.0]], {"5": -1}),
    "post_sampling_probs": st.booleans(),
    "__verbose": st.booleans(),
}
_GUIDED: Final = {
    "grammar": st.sampled_from(_GRAMMARS),
    "json_schema": st.just(_SCHEMA),
    "stop": _one_of("c d", ["c d", "e"], ["a"], [], ["</think>"]),
}
_STREAMING: Final = {
    "stream_options": _one_of({"include_usage": True}, {"include_usage": False}, {}),
}
_MAX_TOKENS: Final = _one_of(0, 1, 2, 5, 9)


def _thread(prefill: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    return [_HELLO] if prefill is None else [_HELLO, {"role": "assistant", **prefill}]


_THREADS: Final = st.one_of(st.none(), st.sampled_from(_PREFILLS)).map(_thread)


def _chats() -> st.SearchStrategy[Shape]:
    always = st.fixed_dictionaries({"messages": _THREADS, "max_tokens": _MAX_TOKENS})
    tools = maybe(
        tools=st.just([{"type": "function", "function": _FUNCTION}]),
        tool_choice=_one_of("auto", "required", "none"),
        parallel_tool_calls=st.booleans(),
    )
    thought = maybe(
        reasoning_format=_one_of("none", "auto", "deepseek", "deepseek-legacy"),
        chat_template_kwargs=_one_of({"thinks": True}, {"thinks": False}),
        continue_final_message=st.one_of(st.booleans(), _one_of("content", "reasoning_content")),
        add_generation_prompt=st.booleans(),
        response_format=_one_of(
            {"type": "json_object", "schema": {"type": "object"}}, {"type": "text"}
        ),
    )
    figures = maybe(
        n=_one_of(1, 2), logprobs=st.booleans(), top_logprobs=_one_of(0, 2), n_probs=_one_of(0, 2)
    )
    return _shapes(
        CHAT, always, tools, thought, figures, maybe(**_SAMPLING), maybe(**_GUIDED, **_STREAMING)
    )


def _texts() -> st.SearchStrategy[Shape]:
    always = st.fixed_dictionaries(
        {
            "prompt": _one_of("Once upon a time", ["Once", "Far away"], [1, 2, 3], "ä🦙"),
            "max_tokens": _MAX_TOKENS,
        }
    )
    figures = maybe(n=_one_of(1, 2), logprobs=_one_of(0, 2), n_probs=_one_of(0, 2))
    return _shapes(TEXT, always, figures, maybe(**_SAMPLING), maybe(**_GUIDED, **_STREAMING))


def _natives() -> st.SearchStrategy[Shape]:
    always = st.fixed_dictionaries(
        {
            "prompt": _one_of("Once upon a time", ["Once", "Far away"], [1, 2, 3], [[1, 2]], ""),
            "n_predict": _MAX_TOKENS,
        }
    )
    figures = maybe(
        n_probs=_one_of(0, 2),
        n_cmpl=_one_of(1, 2),
        response_fields=_one_of(["content"], ["content", "timings/prompt_n"], []),
    )
    return _shapes(NATIVE, always, figures, maybe(**_SAMPLING), maybe(**_GUIDED))


def _messages() -> st.SearchStrategy[Shape]:
    always = st.fixed_dictionaries(
        {"messages": _THREADS.filter(_is_anthropic), "max_tokens": _MAX_TOKENS}
    )
    options = maybe(
        system=_one_of("Be short.", [{"type": "text", "text": "Be short."}]),
        stop_sequences=_one_of(["e"], ["a", "o"], []),
        tools=st.just([{"name": "weather", "description": "Weather", "input_schema": _PARAMETERS}]),
        tool_choice=_one_of({"type": "auto"}, {"type": "any"}),
        thinking=_one_of({"type": "enabled", "budget_tokens": 8}, {"type": "disabled"}),
        chat_template_kwargs=_one_of({"thinks": True}, {"thinks": False}),
        continue_final_message=st.booleans(),
    )
    return _shapes(MESSAGES, always, options, maybe(**_SAMPLING))


def _is_anthropic(thread: list[dict[str, Any]]) -> bool:
    return all(message["content"] is not None for message in thread)


def _responses() -> st.SearchStrategy[Shape]:
    always = st.fixed_dictionaries(
        {
            "input": _one_of("Say hello", [_HELLO], _thread(_PREFILLS[1])),
            "max_output_tokens": _MAX_TOKENS,
        }
    )
    options = maybe(
        instructions=st.just("Be short."),
        tools=st.just([{"type": "function", **_FUNCTION}]),
        tool_choice=_one_of("auto", "required"),
        chat_template_kwargs=_one_of({"thinks": True}, {"thinks": False}),
        continue_final_message=st.booleans(),
        reasoning_format=_one_of("none", "deepseek"),
    )
    return _shapes(RESPONSES, always, options, maybe(**_SAMPLING), maybe(**_GUIDED))


def _shapes(path: str, *parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[Shape]:
    def joined(dictionaries: tuple[dict[str, Any], ...]) -> Shape:
        return path, {name: value for part in dictionaries for name, value in part.items()}

    return st.tuples(*parts).map(joined)


# Requests that were once answered differently.
KNOWN: Final[tuple[Shape, ...]] = (
    (CHAT, {"messages": _thread(_PREFILLS[0]), "max_tokens": 5}),
    (CHAT, {"messages": _thread(_PREFILLS[7]), "max_tokens": 5}),
    (
        CHAT,
        {
            "messages": _thread(_PREFILLS[1]),
            "max_tokens": 5,
            "continue_final_message": True,
            "add_generation_prompt": False,
        },
    ),
    (CHAT, {"messages": [_HELLO], "max_tokens": 1, "grammar": _GRAMMARS[1]}),
    (TEXT, {"prompt": "x", "max_tokens": 1, "grammar": _GRAMMARS[3]}),
    (TEXT, {"prompt": "x", "max_tokens": 5, "grammar": _GRAMMARS[4], "ignore_eos": True}),
    (RESPONSES, {"input": "Say hello", "max_output_tokens": 2, "timings_per_token": True}),
    (RESPONSES, {"input": "Say hello", "max_output_tokens": 2, "grammar": _GRAMMARS[3]}),
    (MESSAGES, {"messages": _thread(_PREFILLS[2]), "max_tokens": 1}),
    (TEXT, {"prompt": ["Once", "Far away"], "max_tokens": 1, "verbose": True}),
)

SHAPES: Final = st.one_of(_chats(), _texts(), _natives(), _messages(), _responses())
