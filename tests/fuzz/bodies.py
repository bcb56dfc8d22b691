"""Valid requests for every endpoint, the base of mutations."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any, Final

from proxy.upstream.endpoint_kinds import ENDPOINTS

MODELS: Final = ("m", "m", "m", "m", "m", "m", "embed", "later", "m:high", "alias")
_SAMPLING: Final[Mapping[str, Any]] = {
    "temperature": 0.7,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.05,
    "typical_p": 1.0,
    "seed": 1,
    "repeat_penalty": 1.1,
    "repeat_last_n": 64,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.5,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": 64,
    "dry_sequence_breakers": ["\n", ":"],
    "xtc_probability": 0.1,
    "xtc_threshold": 0.1,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "dynatemp_range": 0.1,
    "dynatemp_exponent": 1.0,
    "samplers": ["top_k", "temperature"],
    "min_keep": 0,
    "logit_bias": [[5, 1.0]],
    "ignore_eos": False,
    "stop": ["zz"],
    "n_probs": 2,
    "cache_prompt": True,
    "id_slot": 0,
    "n_keep": 0,
    "t_max_predict_ms": 0,
    "return_tokens": True,
    "timings_per_token": True,
    "post_sampling_probs": False,
    "response_fields": ["content"],
    "lora": [],
    "user": "u",
    "keep_alive": "5m",
}
_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "d",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string"}},
            "required": ["at"],
        },
    },
}
_SCHEMA: Final = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0}, "b": {"enum": ["x", "y"]}},
}
_CHAT: Final[Mapping[str, Any]] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "again"},
    ],
    "stream_options": {"include_usage": True},
    "n": 1,
    "logprobs": True,
    "top_logprobs": 2,
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA}},
    "tools": [_TOOL],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning_format": "none",
    "chat_template_kwargs": {"enable_thinking": False},
    "add_generation_prompt": True,
    "continue_final_message": False,
    "service_tier": "flex",
    "metadata": {"user_id": "u_session_1"},
}
_COMPLETION: Final[Mapping[str, Any]] = {
    "prompt": "once upon",
    "n": 1,
    "echo": False,
    "logprobs": 1,
    "suffix": "",
    "grammar": 'root ::= "a" | "b" root',
    "json_schema": _SCHEMA,
}
_BODIES: Final[Mapping[str, Mapping[str, Any]]] = {
    "chat/completions": {**_CHAT, "max_tokens": 4},
    "completions": {**_COMPLETION, "max_tokens": 4},
    "completion": {**_COMPLETION, "n_predict": 4},
    "messages": {
        "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        "max_tokens": 4,
        "tools": [{"name": "look", "description": "d", "input_schema": _SCHEMA}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "disabled"},
        "stop_sequences": ["zz"],
        "metadata": {"user_id": "u"},
    },
    "responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "hello"}]}],
        "instructions": "s",
        "max_output_tokens": 4,
        "text": {"format": {"type": "text"}},
        "tools": [{"type": "function", "name": "look", "parameters": _SCHEMA}],
        "previous_response_id": None,
        "store": False,
        "reasoning": {"effort": "low"},
    },
    "infill": {
        "input_prefix": "def f():",
        "input_suffix": "return 1",
        "input_extra": [{"filename": "a.py", "text": "x = 1"}],
        "prompt": "",
        "n_predict": 4,
    },
    "embedding": {"content": ["hello", [1, 2, 3]], "embd_normalize": 2},
    "embeddings": {"input": ["hello", "again"], "encoding_format": "float", "dimensions": 8},
    "rerank": {"query": "q", "documents": ["a", "b"], "top_n": 1, "return_text": True},
    "tokenize": {"content": "hello", "add_special": True, "with_pieces": True},
    "detokenize": {"tokens": [5, 6, 7]},
    "apply-template": {"messages": _CHAT["messages"], "tools": [_TOOL]},
    "count_tokens": {"messages": [{"role": "user", "content": "hello"}], "system": "s"},
    "transcriptions": {"file": "x"},
}
PAGES: Final = tuple(ENDPOINTS["POST"])
GENERATING: Final = ("/v1/chat/completions", "/v1/completions", "/completion", "/v1/messages")


def body(random: Random, path: str) -> dict[str, Any]:
    counted = path.removesuffix("/input_tokens")  # the endpoint whose prompt it counts
    name = counted.rpartition("/")[2].replace("reranking", "rerank")
    name = counted.removeprefix("/").removeprefix("v1/") if "chat" in counted else name
    whole = dict(_BODIES[name])
    needed = {"messages", "prompt", "input", "max_tokens", "n_predict", "max_output_tokens"}
    chosen = {key: entry for key, entry in whole.items() if key in needed or random.random() < 0.4}
    if needed & whole.keys():
        chosen |= {key: entry for key, entry in _SAMPLING.items() if random.random() < 0.15}
    # Both at once are rejected, so mostly only one.
    if "grammar" in chosen:
        chosen.pop("json_schema", None)
    model = random.choice(MODELS)
    if "embed" in path or "rerank" in path:
        model = random.choice(("embed", "embed", "embed", "m"))
    return {"model": model, "stream": random.random() < 0.4, **chosen}
