"""The common beginning of many conversations is recognised, once it is worth it."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.cache.prompt import BLOCK_BYTES, read_prompt
from proxy.cache.shared_prefixes import BeginningUse, SharedPrefix, SharedPrefixes
from proxy.upstream.endpoint_kinds import EndpointKind

LONG = "be kind and brief " * 80
SYSTEM = {"role": "system", "content": LONG}
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
PLAIN = {"name": "f", "input_schema": {}}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def chat(text: str, *leading: dict[str, Any], **members: Any) -> dict[str, Any]:
    return {"messages": [*(leading or (SYSTEM,)), user(text)], **members}


def seen(
    *bodies: dict[str, Any],
    kind: EndpointKind = EndpointKind.CHAT,
    model: str = "chat",
    openings: SharedPrefixes,
) -> list[SharedPrefix | None]:
    return [openings.observe(model, kind, body, read_prompt(kind, model, body)) for body in bodies]


def learned(kind: EndpointKind, **members: Any) -> SharedPrefix | None:
    """Return the prefixes learned from three conversations with these members."""
    page = "input" if kind is EndpointKind.RESPONSES else "messages"
    before = members.pop(page, [])
    bodies = [{**members, page: [*before, user(text)]} for text in ("one", "two", "three")]
    *first, last = seen(*bodies, kind=kind, openings=SharedPrefixes())
    assert first == [None, None]
    return last


def test_the_third_conversation_that_begins_alike_tells_of_it_and_each_third_from_then() -> None:
    openings = SharedPrefixes()
    found = seen(*(chat(f"question {at}") for at in range(7)), openings=openings)
    assert [opening is not None for opening in found] == [False, False, True] * 2 + [False]
    assert found[2]
    assert found[2].body == {"messages": [SYSTEM]}
    assert found[2].tokens >= len(LONG) // 4


def test_a_prefix_is_one_of_its_adapters() -> None:
    openings, lora = SharedPrefixes(), [{"id": 0, "scale": 1.0}]
    bodies = [chat(f"question {at}", **more) for at in range(3) for more in ({}, {"lora": lora})]
    base, adapted = seen(*bodies, openings=openings)[-2:]
    assert base
    assert adapted
    assert base.body == {"messages": [SYSTEM]}
    assert adapted.body == {"messages": [SYSTEM], "lora": lora}
    assert set(base.blocks).isdisjoint(adapted.blocks)


def test_further_turns_and_other_ways_to_write_the_same_begin_no_conversation() -> None:
    openings = SharedPrefixes()
    first = chat("one")
    turn = [*first["messages"], {"role": "assistant", "content": "yes"}, user("two")]
    marked = {"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}
    written = {"messages": [SYSTEM, {"role": "user", "content": [marked]}]}
    assert seen(first, {"messages": turn}, written, first, openings=openings) == [None] * 4
    assert seen(chat("two"), chat("three"), openings=openings)[-1]


def test_models_are_counted_apart() -> None:
    openings = SharedPrefixes()
    seen(chat("one"), chat("two"), openings=openings)
    assert seen(chat("three"), model="other", openings=openings) == [None]


def test_all_that_shapes_a_prompt_is_part_of_it() -> None:
    kwargs = {"enable_thinking": False}
    shaping = {"tools": [TOOL], "parallel_tool_calls": False, "chat_template_kwargs": kwargs}
    developer = {"role": "developer", "content": [{"type": "text", "text": "so"}]}
    opening = learned(EndpointKind.CHAT, messages=[SYSTEM, developer], temperature=1, **shaping)
    assert opening
    assert opening.body == {"messages": [SYSTEM, developer], **shaping}


def test_anthropics_system_prompt_and_plain_tools_are_learned_in_openais_words() -> None:
    blocks = [{"type": "text", "text": LONG, "cache_control": {}}, {"type": "text", "text": "so"}]
    opening = learned(EndpointKind.MESSAGES, system=blocks, tools=[PLAIN])
    assert opening
    system = {"role": "system", "content": LONG + "so"}
    assert opening.body == {"messages": [system], "tools": [TOOL]}


def test_the_instructions_of_a_response_are_its_system_prompt() -> None:
    opening = learned(EndpointKind.RESPONSES, instructions=LONG)
    assert opening
    assert opening.body == {"messages": [SYSTEM]}


def test_the_stamp_that_changes_with_each_request_is_overwritten_as_the_engine_does() -> None:
    stamp = "x-anthropic-billing-header: cc_version=2; cch={}; "
    blocks = [{"type": "text", "text": stamp.format("a5145")}, {"type": "text", "text": LONG}]
    opening = learned(EndpointKind.MESSAGES, system=blocks)
    assert opening
    assert opening.body == {"messages": [{**SYSTEM, "content": stamp.format("fffff") + LONG}]}


@pytest.mark.parametrize(
    ("kind", "members"),
    [
        (EndpointKind.CHAT, {"messages": [SYSTEM, {**SYSTEM, "content": "so"}], "tools": [TOOL]}),
        (EndpointKind.MESSAGES, {"system": LONG, "tools": [PLAIN], "messages": []}),
        (EndpointKind.RESPONSES, {"instructions": LONG, "input": []}),
    ],
)
def test_prompts_that_begin_with_a_prefix_begin_with_its_blocks(
    kind: EndpointKind, members: dict[str, Any]
) -> None:
    page = "input" if kind is EndpointKind.RESPONSES else "messages"
    prefix = learned(kind, **members)
    assert prefix
    later = {**members, page: [*members.get(page, []), user("another"), user("question")]}
    prompt = read_prompt(kind, "chat", later)
    assert prompt
    assert prompt.blocks[: len(prefix.blocks)] == prefix.blocks
    before = prompt.outline.size_bytes - sum(prompt.outline.sizes_bytes[-2:])
    assert len(prefix.blocks) == before // BLOCK_BYTES


@pytest.mark.parametrize(
    ("kind", "members"),
    [
        (EndpointKind.CHAT, {"messages": [{"role": "system", "content": "short"}]}),
        (EndpointKind.CHAT, {"messages": []}),
        (EndpointKind.CHAT, {"messages": [{"role": "system", "content": "long" * 300_000}]}),
        (
            EndpointKind.CHAT,
            {"messages": [{"role": "system", "content": [{"type": "image_url"}]}, SYSTEM]},
        ),
        (EndpointKind.MESSAGES, {"system": [{"type": "image"}, {"type": "text", "text": LONG}]}),
        (EndpointKind.MESSAGES, {"system": LONG, "tools": [{"type": "web_search", "name": "web"}]}),
        (EndpointKind.MESSAGES, {"system": LONG, "tools": [PLAIN], "tool_choice": {"type": "any"}}),
        (EndpointKind.MESSAGES, {}),
        (EndpointKind.RESPONSES, {"instructions": LONG, "tools": [TOOL]}),
        (
            EndpointKind.RESPONSES,
            {"instructions": LONG, "input": [{"role": "developer", "content": "x"}]},
        ),
        (EndpointKind.RESPONSES, {}),
        (EndpointKind.LLAMA_COMPLETION, {"prompt": LONG}),
    ],
)
def test_what_is_short_huge_or_not_surely_the_same_prompt_is_not_learned(
    kind: EndpointKind, members: dict[str, Any]
) -> None:
    assert learned(kind, **members) is None


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": 1},
        {"messages": [SYSTEM]},
        {"messages": [SYSTEM, 1]},
        {"messages": [{"role": "system"}, user("x")]},
        {"messages": [SYSTEM, user("x")], "tools": 1, "system": 1, "instructions": [], "input": 1},
        {"instructions": LONG, "input": None},
        {"system": LONG, "messages": [user("x")], "tools": [1], "tool_choice": "auto"},
    ],
)
def test_whatever_a_body_says_nothing_fails(body: dict[str, Any]) -> None:
    for kind in EndpointKind:
        assert seen(body, kind=kind, openings=SharedPrefixes()) == [None], kind


def test_what_was_seen_least_recently_is_forgotten_first() -> None:
    openings = SharedPrefixes()
    old, new = chat("one", {**SYSTEM, "content": "a" + LONG}), chat("one")
    seen(old, {**old, "messages": [old["messages"][0], user("two")]}, openings=openings)
    for at in range(256):
        seen(chat("one", {**SYSTEM, "content": f"{at}{LONG}"}), openings=openings)
    seen(new, chat("two"), openings=openings)
    assert seen(chat("three", old["messages"][0]), openings=openings) == [None]
    assert seen(chat("three"), openings=openings)[0]


def test_beginnings_of_one_conversation_each_are_soon_expected_to_be_used_once() -> None:
    use = BeginningUse()
    expected = [use.note(beginning) for beginning in range(48)]
    assert expected == sorted(expected, reverse=True)
    assert expected[0] == 0.5
    assert expected[-1] < 0.02
    assert use.note(1) >= 0.5  # a second conversation has it


def test_beginnings_of_many_conversations_are_expected_again() -> None:
    use = BeginningUse()
    for beginning in (1, 1, 2, 2, 1, 3, 3):
        use.note(beginning)
    assert use.note(4) > 0.8


def test_a_beginning_is_all_before_the_first_message_of_the_user() -> None:
    prompt = read_prompt(EndpointKind.CHAT, "chat", chat("one"))
    other = read_prompt(EndpointKind.CHAT, "chat", chat("another one"))
    assert prompt
    assert other
    blocks = prompt.beginning_blocks
    assert blocks == len(LONG.encode()) // BLOCK_BYTES
    assert prompt.blocks[:blocks] == other.blocks[:blocks]
    later = [*chat("one")["messages"], {"role": "assistant", "content": "a"}, user("two")]
    turn = read_prompt(EndpointKind.CHAT, "chat", {"messages": later})
    assert turn
    assert turn.beginning_blocks == 0
