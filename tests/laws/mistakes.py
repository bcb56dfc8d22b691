"""Requests that are wrong in one place: each member of each page, with values of a wrong type."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

Request = tuple[str, dict[str, Any]]

# JSON of every type, some of it nested.
WRONG: Final[tuple[Any, ...]] = (
    *(None, True, -1, 1e308, "", "x"),
    *([], {}, [[]], [None], [{}], {"a": {"b": [1]}}, [[[[1]]]]),
)
_USER: Final = {"role": "user", "content": "hi"}
_FUNCTION: Final = {"name": "f", "description": "d", "parameters": {"type": "object"}}
_CALL: Final = {"id": "a", "type": "function"}

_SAMPLING: Final = (
    *("n", "n_predict", "n_cmpl", "n_probs", "n_keep", "n_discard", "n_indent", "n_cache_reuse"),
    *("stream", "stop", "seed", "temperature", "top_p", "top_k", "min_p", "top_n_sigma"),
    *("typical_p", "dynatemp_range", "xtc_probability", "mirostat", "min_keep", "logit_bias"),
    *("logprobs", "top_logprobs", "grammar", "grammar_lazy", "grammar_triggers"),
    *("preserved_tokens", "json_schema", "response_format", "samplers", "lora"),
    *("dry_sequence_breakers", "dry_multiplier", "frequency_penalty", "presence_penalty"),
    *("repeat_penalty", "repeat_last_n", "cache_prompt", "response_fields", "return_tokens"),
    *("return_progress", "timings_per_token", "verbose", "stream_options", "id_slot"),
    *("ignore_eos", "post_sampling_probs", "backend_sampling", "t_max_predict_ms"),
)
_TEMPLATE: Final = (
    *("tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "reasoning_format"),
    *("add_generation_prompt", "continue_final_message", "enable_thinking", "reasoning_effort"),
    *("reasoning_budget_tokens", "thinking_forced_open", "reasoning_in_content"),
)

# The members that a page needs, and the others that it reads.
PAGES: Final[Mapping[str, tuple[dict[str, Any], Sequence[str]]]] = {
    "/v1/chat/completions": (
        {"messages": [_USER], "max_tokens": 2},
        ["max_completion_tokens", "functions", "function_call", *_SAMPLING, *_TEMPLATE],
    ),
    "/v1/completions": (
        {"prompt": "hi", "max_tokens": 2},
        ["echo", "suffix", "best_of", *_SAMPLING],
    ),
    "/completion": ({"prompt": "hi", "n_predict": 2}, _SAMPLING),
    "/infill": (
        {"input_prefix": "a", "input_suffix": "b", "n_predict": 2},
        ["input_extra", "prompt", "stop", "logit_bias", "grammar", "stream"],
    ),
    "/v1/messages": (
        {"messages": [_USER], "max_tokens": 2},
        ["system", "stop_sequences", "thinking", "metadata", "stream", *_TEMPLATE],
    ),
    "/v1/messages/count_tokens": ({"messages": [_USER]}, ["system", "tools", "thinking"]),
    "/v1/responses": (
        {"input": "hi", "max_output_tokens": 2},
        ["instructions", "previous_response_id", "text", "reasoning", "stream", *_TEMPLATE],
    ),
    "/v1/embeddings": ({"input": "hi"}, ["encoding_format", "dimensions", "embd_normalize"]),
    "/embedding": ({"content": "hi"}, ["input", "embd_normalize"]),
    "/v1/rerank": ({"query": "q", "documents": ["a", "b"]}, ["texts", "top_n", "return_text"]),
    "/tokenize": ({"content": "hi"}, ["add_special", "parse_special", "with_pieces"]),
    "/detokenize": ({"tokens": [1, 2]}, []),
    "/apply-template": ({"messages": [_USER]}, ["response_format", "json_schema", *_TEMPLATE]),
    "/v1/chat/completions/input_tokens": ({"messages": [_USER]}, _TEMPLATE),
    "/v1/responses/input_tokens": ({"input": "hi"}, ["instructions", "text", *_TEMPLATE]),
    "/v1/chat/completions/control": ({"id": "a", "action": "reasoning_end"}, []),
}


def _inside(value: Any) -> Mapping[str, Sequence[Any]]:
    """Return members that hold a wrong value within a valid one."""
    answer = {"role": "assistant", "content": None}
    parts = [{"type": name, name: value} for name in ("text", "image_url", "input_audio")]
    functions = [value, {**_FUNCTION, "name": value}, {**_FUNCTION, "parameters": value}]
    called = [value, {"name": "f", "arguments": value}]
    schemas = [
        *({"type": value}, {"properties": value}, {"enum": value}, {"anyOf": value}),
        *({"type": "string", "pattern": value}, {"type": "integer", "minimum": value}),
        *({"$ref": value}, {"type": "array", "items": value}),
    ]
    return {
        "messages": [
            [value],
            [{"role": value, "content": "x"}],
            [{"role": "user", "content": value}],
            *([{"role": "user", "content": [part]}] for part in [*parts, {"type": value}]),
            [_USER, {**answer, "tool_calls": value}],
            *(
                [_USER, {**answer, "tool_calls": [{**_CALL, "function": entry}]}]
                for entry in called
            ),
            [_USER, {"role": "tool", "content": "x", "tool_call_id": value}],
            [_USER, {**answer, "reasoning_content": value}],
        ],
        "tools": [
            [{"type": value, "function": _FUNCTION}],
            [{"name": "f", "input_schema": value}],
            [{"type": "function", "name": value}],
            *([{"type": "function", "function": function}] for function in functions),
        ],
        "response_format": [
            {"type": value},
            *({"type": "json_schema", "json_schema": case} for case in (value, {"schema": value})),
            {"type": "json_object", "schema": value},
        ],
        "json_schema": schemas,
        "input": [[value], ["a", value], [{"role": "user", "content": value}], [{"type": value}]],
        "prompt": [[value, value], [value, 1], {"prompt_string": value}],
        "content": [[value], ["a", value]],
        "tokens": [[value]],
        "documents": [[value], ["a", value]],
        "system": [[value], [{"type": "text", "text": value}]],
        "thinking": [{"type": value}, {"type": "enabled", "budget_tokens": value}],
        "tool_choice": [{"type": value}],
        "text": [{"format": value}, {"format": {"type": "json_schema", "schema": value}}],
        "logit_bias": [[value], [[value, 1]], [[1, value]]],
        "lora": [[{"id": value, "scale": 1}], [{"id": 0, "scale": value}]],
        "grammar_triggers": [[value], [{"type": value, "value": "a"}]],
        "stream_options": [{"include_usage": value}],
        "chat_template_kwargs": [{"enable_thinking": value}, {"messages": value}],
        "input_extra": [[value], [{"text": value, "filename": "a"}]],
        **{name: [[value]] for name in ("stop", "samplers", "preserved_tokens")},
        **{name: [[value]] for name in ("response_fields", "dry_sequence_breakers")},
    }


# Of the right type, but out of range, or no such thing.
_BEYOND: Final[Mapping[str, Sequence[Any]]] = {
    "tokens": [[99999999], [-1], [2**40], [1.5], ["1"]],
    "prompt": [[99999999], [-5], ["a", 99999999], [[1], "x"]],
    "input": [[99999999], ["x "] * 3, "x " * 3000],
    "query": ["x " * 3000],
    "grammar": [
        "root ::= ",
        "root ::= a",
        'x ::= "a"',
        'root ::= "',
        "root ::= (",
        "root ::= root",
    ],
    "tool_choice": ["weird", {"type": "function", "function": {"name": "zz"}}],
    "json_schema": [{"type": "string", "pattern": name} for name in ("(", "[a", "*", "^(?=a)$")],
    "n_predict": [-2, 2**31, 2**63],
    "seed": [2**63],
    "reasoning_format": ["deepseek"],
}


def requests() -> Iterator[Request]:
    """Yield every request; the same ones in the same order each time."""
    for page, (needed, others) in PAGES.items():
        yield page, {}
        for name in needed:
            yield page, {other: needed[other] for other in needed if other != name}
        inside = [_inside(value) for value in WRONG]
        for name in (*needed, *others):
            within = [value for members in inside for value in members.get(name, ())]
            for value in (*WRONG, *within, *_BEYOND.get(name, ())):
                yield page, {**needed, name: value}
