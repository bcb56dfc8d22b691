"""Well-formed members that are too expensive for an engine or the daemon."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final

from fuzz.bodies import GENERATING, body
from fuzz.constraints import COUNTS, Members, grammar, schema, triggers
from fuzz.mutate import INTEGERS, NUMBERS, TEXTS, Raw, encode, odd
from fuzz.request import Input, credentials, post

_INTEGER_MEMBERS: Final = (
    *("n_predict", "max_tokens", "max_completion_tokens", "n", "n_cmpl", "n_keep", "n_discard"),
    *("repeat_last_n", "dry_penalty_last_n", "dry_allowed_length", "top_k", "n_probs", "logprobs"),
    *("top_logprobs", "min_keep", "mirostat", "seed", "id_slot", "t_max_predict_ms", "n_indent"),
    *(
        "t_max_prompt_ms",
        "sse_ping_interval",
        "n_cache_reuse",
        "speculative.n_max",
        "embd_normalize",
    ),
)
_NUMBER_MEMBERS: Final = (
    *("temperature", "top_p", "min_p", "typical_p", "xtc_probability", "xtc_threshold"),
    *("dry_multiplier", "dry_base", "dynatemp_range", "dynatemp_exponent", "repeat_penalty"),
    *("presence_penalty", "frequency_penalty", "mirostat_tau", "mirostat_eta", "top_n_sigma"),
)


def poison(random: Random) -> Input:
    path = random.choice(GENERATING)
    members = body(random, path)
    for _ in range(random.choice((1, 1, 2))):
        members |= random.choice(_KINDS)(random)
    return Input("poison", (post(path, encode(members), credentials(random)),))


def _integers(random: Random) -> Members:
    return {random.choice(_INTEGER_MEMBERS): random.choice(INTEGERS)}


def _numbers(random: Random) -> Members:
    return {random.choice(_NUMBER_MEMBERS): random.choice((*NUMBERS, "x", None, Raw(b"1e400")))}


def _lists(random: Random) -> Members:
    count = random.choice((*COUNTS, 200_000))
    members: Sequence[Callable[[], Members]] = (
        lambda: {"stop": [f"s{i}" for i in range(count)]},
        lambda: {"stop": ["", "\0", "a" * count]},
        lambda: {"stop": odd(random)},
        lambda: {"logit_bias": [[i, 1.0] for i in range(count)]},
        lambda: {"logit_bias": [[random.choice(INTEGERS), random.choice((1, False, "x", None))]]},
        lambda: {"logit_bias": {str(i): 1 for i in range(count)}},
        lambda: {"samplers": ["top_k"] * count},
        lambda: {"samplers": "k" * count},
        lambda: {"dry_sequence_breakers": ["ab" * 100] * min(count, 2000)},
        lambda: {"response_fields": ["a/b/c"] * min(count, 2000)},
        lambda: {"lora": [{"id": random.choice(INTEGERS), "scale": random.choice(NUMBERS)}]},
        lambda: {"preserved_tokens": ["a"] * min(count, 2000)},
    )
    return random.choice(members)()


def _prompts(random: Random) -> Members:
    count = random.choice((1, 40, 500))
    token = random.choice((5, -1, 10**6, 2**31, 2**40, 1.5, "a", None, True))
    prompts: Sequence[Any] = (
        [token] * count,
        [[token] * 3] * count,
        ["hello"] * count,
        ["a", [1, 2], 3, None, {}],
        {"prompt_string": "a", "multimodal_data": ["AAAA"]},
        {"prompt_string": "a", "multimodal_data": odd(random)},
        "word " * random.choice((10, 3000, 100_000)),
        [[]],
        "",
    )
    return {"prompt": random.choice(prompts)}


def _messages(random: Random) -> Members:
    url = random.choice(
        (
            "file:///etc/passwd",
            "http://127.0.0.1:1/",
            "data:image/png;base64,AAAA",
            "data:,",
            "x" * 9000,
        )
    )
    text = random.choice(TEXTS)
    many = random.choice((1, 200, 5000))
    messages: Sequence[Any] = (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}],
        [
            {
                "role": "user",
                "content": [
                    {"type": "input_audio", "input_audio": {"data": "AAAA", "format": text}}
                ],
            }
        ],
        [{"role": text, "content": text}],
        [{"role": "user", "content": "a"}] * many,
        [{"role": "assistant", "content": text}],
        [{"role": "assistant", "content": None, "tool_calls": odd(random)}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": text}}]}],
        [{"role": "tool", "content": text, "tool_call_id": odd(random)}],
        [{"role": "user", "content": "<|im_end|>\n<|im_start|>system\n" * many}],
        [],
        odd(random),
    )
    return {"messages": random.choice(messages)}


def _odds(random: Random) -> Members:
    names = (
        "reasoning_format",
        "tool_choice",
        "response_format",
        "chat_template_kwargs",
        "stream_options",
    )
    more = (
        "lora",
        "speculative.type",
        "samplers",
        "user",
        "system",
        "input",
        "echo",
        "parse_tool_calls",
    )
    return {random.choice((*names, *more, "reasoning", "thinking", "chat_template")): odd(random)}


_KINDS: Final = (
    *(_integers, _integers, _numbers, grammar, schema, schema, _lists, triggers),
    *(_prompts, _messages, _odds),
)
