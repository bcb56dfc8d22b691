"""Equal beginnings are seen in requests of all APIs, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.cache.prompt import BLOCK_TOKENS, Prompt, read_prompt, session_hash
from proxy.upstream.endpoint_kinds import EndpointKind

SYSTEM = "You write verse, and nothing but verse. " * 8
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


def prompt(kind: EndpointKind, model: str = "chat", **members: Any) -> Prompt:
    read = read_prompt(kind, model, members)
    assert read
    return read


def chat(*messages: dict[str, Any], **members: Any) -> Prompt:
    return prompt(EndpointKind.CHAT, messages=list(messages), **members)


def user(content: object) -> dict[str, Any]:
    return {"role": "user", "content": content}


def shared(prompt: Prompt, other: Prompt) -> int:
    pairs = zip(prompt.blocks, other.blocks, strict=False)
    return next(
        (at for at, (a, b) in enumerate(pairs) if a != b),
        min(map(len, (prompt.blocks, other.blocks))),
    )


texts = st.text(st.characters(codec="utf-8"), max_size=200)


@given(texts, texts, texts)
def test_a_common_beginning_is_a_common_beginning_of_blocks(a: str, b: str, c: str) -> None:
    one = prompt(EndpointKind.COMPLETION, prompt=SYSTEM + a + b)
    other = prompt(EndpointKind.COMPLETION, prompt=SYSTEM + a + c)
    common = len((SYSTEM + a).encode())
    assert shared(one, other) >= common // 64


@given(texts, texts)
def test_blocks_differ_from_the_first_that_differs(a: str, b: str) -> None:
    one, other = (prompt(EndpointKind.COMPLETION, prompt=SYSTEM + text + SYSTEM) for text in (a, b))
    same = 0
    raw = [(SYSTEM + text + SYSTEM).encode() for text in (a, b)]
    while same < min(map(len, raw)) and raw[0][same] == raw[1][same]:
        same += 1
    assert shared(one, other) == same // 64


turns = st.lists(texts.filter(str.strip), min_size=1, max_size=7).filter(lambda t: len(t) % 2)


@given(turns, texts.filter(str.strip), texts.filter(str.strip))
def test_the_next_turn_is_known_by_the_answered_one(
    said: list[str], answer: str, question: str
) -> None:
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(said)]
    reply = {"role": "assistant", "content": answer}
    before = chat(*messages)
    after = chat(*messages, reply, user(question))
    assert before.hash_with_reply(reply) == after.turn_hashes[-2]
    assert before.turn_hashes[-1] == after.turn_hashes[-3]
    assert shared(before, after) == len(before.blocks)


CALL = {"function": {"name": "look", "arguments": '{"at": 1, "b": [2]}'}, "id": "c1", "index": 0}
ANSWER = {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL]}
NEXT: list[tuple[EndpointKind, dict[str, Any]]] = [
    (
        EndpointKind.CHAT,
        {
            "messages": [
                {"role": "system", "content": SYSTEM},
                user("Where?"),
                {**ANSWER, "refusal": None, "content": [{"type": "text", "text": "Let me see. "}]},
                {"role": "tool", "content": "here", "tool_call_id": "c1"},
            ]
        },
    ),
    (
        EndpointKind.MESSAGES,
        {
            "system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
            "messages": [
                user([{"type": "text", "text": "Where?"}]),
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm"},
                        {"type": "text", "text": "Let me see."},
                        {
                            "type": "tool_use",
                            "id": "x",
                            "name": "look",
                            "input": {"b": [2], "at": 1},
                        },
                    ],
                },
                user([{"type": "tool_result", "tool_use_id": "x", "content": "here"}]),
            ],
        },
    ),
    (
        EndpointKind.RESPONSES,
        {
            "instructions": SYSTEM,
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "Where?"}]},
                {"type": "reasoning", "summary": []},
                {"role": "assistant", "content": [{"type": "output_text", "text": "Let me see."}]},
                {
                    "type": "function_call",
                    "call_id": "c1",
                    "name": "look",
                    "arguments": '{"b":[2],"at":1}',
                },
                {"type": "function_call_output", "call_id": "c1", "output": "here"},
            ],
        },
    ),
]


@pytest.mark.parametrize(("kind", "members"), NEXT, ids=[kind.name for kind, _ in NEXT])
def test_every_api_says_the_same_in_its_own_words(
    kind: EndpointKind, members: dict[str, Any]
) -> None:
    first = chat({"role": "system", "content": SYSTEM}, user("Where?"))
    again = prompt(kind, **members)
    assert again.turn_hashes[-2] == first.hash_with_reply(ANSWER)
    assert again.blocks == prompt(*NEXT[0][:1], **NEXT[0][1]).blocks


def test_models_loras_tools_and_template_settings_are_kept_apart() -> None:
    plain = chat(user(SYSTEM))
    others = [
        prompt(EndpointKind.CHAT, "other", messages=[user(SYSTEM)]),
        chat(user(SYSTEM), lora=[{"id": 0, "scale": 1.0}]),
        chat(user(SYSTEM), tools=TOOLS),
        chat(user(SYSTEM), chat_template_kwargs={"enable_thinking": False}),
    ]
    assert all(not set(plain.blocks) & set(other.blocks) for other in others)
    assert all(not set(plain.turn_hashes) & set(other.turn_hashes) for other in others)


def test_an_image_counts_as_many_tokens() -> None:
    def about(data: str) -> Prompt:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        return chat(user([{"type": "text", "text": SYSTEM}, image]), user("And this?"))

    text = chat(user(SYSTEM), user("And this?"))
    assert 250 < about("A").tokens - text.tokens < 300
    assert shared(about("A"), about("A")) * BLOCK_TOKENS > 250
    assert shared(about("A"), about("B")) == shared(text, about("B"))


def test_an_image_counts_by_its_content() -> None:
    def picture(data: str, **more: object) -> Prompt:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}, **more}
        return chat(user([image, {"type": "text", "text": "What is it?"}]))

    assert (
        picture("AAAA").turn_hashes
        == picture("AAAA", cache_control={"type": "ephemeral"}).turn_hashes
    )
    assert picture("AAAA").turn_hashes != picture("AAAB").turn_hashes


def test_tokens_are_as_good_as_text() -> None:
    tokens = list(range(100))
    one = prompt(EndpointKind.LLAMA_COMPLETION, prompt=tokens)
    assert one.tokens == 100
    assert (
        one.blocks
        == prompt(EndpointKind.LLAMA_COMPLETION, prompt=[*tokens, 7]).blocks[: len(one.blocks)]
    )
    assert prompt(EndpointKind.LLAMA_COMPLETION, prompt=["a b", [1, 2], 3]).tokens >= 1
    assert prompt(
        EndpointKind.LLAMA_COMPLETION, prompt={"prompt_string": "a", "multimodal_data": ["x"]}
    ).turn_hashes


def test_infill_reads_the_text_around_the_gap() -> None:
    around = {"input_prefix": "def f():", "input_suffix": "return 1"}
    one = prompt(EndpointKind.INFILL, input_extra=[{"text": "x"}], **around)
    assert one.turn_hashes != prompt(EndpointKind.INFILL, **around).turn_hashes


@pytest.mark.parametrize(
    "kind", [EndpointKind.EMBED_OR_RERANK, EndpointKind.TRANSCRIPTION, EndpointKind.INFO]
)
def test_what_has_no_prompt_has_none(kind: EndpointKind) -> None:
    assert read_prompt(kind, "chat", {"input": "abc", "messages": [user("a")]}) is None


def deep() -> object:
    value: object = []
    for _ in range(300):
        value = [value]
    return value


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"messages": "x"},
        {"messages": [1, None, {"role": 7, "content": 8}]},
        {"messages": [{"role": "user", "content": [7, {"type": "text", "text": 7}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [1, {"function": 2}, {"function": {}}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}]},
        {"messages": [user("a")], "tools": deep()},
        {"system": 7, "input": 8, "prompt": {"prompt_string": 9}},
        {"prompt": [None, True, [["x"]]], "input": [{"type": "tool_result", "content": [3]}]},
    ],
)
def test_nonsense_is_no_fault_of_ours(members: dict[str, Any]) -> None:
    for kind in EndpointKind:
        read_prompt(kind, "chat", members)


def test_a_prompt_without_end_is_bounded() -> None:
    long = prompt(EndpointKind.COMPLETION, prompt="x" * 5_000_000)
    assert len(long.blocks) == 8192
    assert long.tokens == 1_250_000
    many = [user("hi") for _ in range(9000)]
    assert read_prompt(EndpointKind.CHAT, "chat", {"messages": many}) is None
    assert len(chat(*many[:100]).turn_hashes) == 32


def test_a_session_is_one_clients_own() -> None:
    assert session_hash("chat", "ann", "s") == session_hash("chat", "ann", "s")
    assert len({session_hash("chat", who, "s") for who in ("ann", "bob")}) == 2
    scales = ((), (0.0,), (1.0,), (0.5,))
    assert len({session_hash("chat", "ann", "s", of) for of in scales}) == 4


def test_a_block_is_so_many_tokens() -> None:
    one = prompt(EndpointKind.COMPLETION, prompt="x" * 6400)
    assert len(one.blocks) * BLOCK_TOKENS == one.tokens


def test_hashes_are_the_same_in_every_process() -> None:
    program = (
        "from proxy.cache.prompt import read_prompt\n"
        "from proxy.upstream.endpoint_kinds import EndpointKind\n"
        "message = {'role': 'user', 'content': 'a' * 200}\n"
        "read = read_prompt(EndpointKind.CHAT, 'chat', {'messages': [message]})\n"
        "print(read.blocks, read.turn_hashes)"
    )
    other = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    ours = chat(user("a" * 200))
    assert other.stdout.strip() == f"{ours.blocks} {ours.turn_hashes}"
