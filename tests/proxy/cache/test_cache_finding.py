"""From hashes and figures alone, the cause of a prompt that was not cached is named."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.cache.holders import Run
from proxy.cache.miss_cause import CacheFacts, CacheKind, CachePlace, RecentPrompt, find_cause
from proxy.cache.prompt import Prompt, read_prompt
from proxy.observe.cache_finding import CacheFinding, Cause, cache_finding
from proxy.observe.explanation import advice, cache_sentence
from proxy.upstream.endpoint_kinds import EndpointKind

RULES = "Answer briefly, and only what you know. " * 20
STORY = "The river runs by the garden wall under the old stone bridge. " * 20


RUN = Run("chat.0", (), 1)


def say(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


TALK = [say("system", RULES), say("user", STORY), say("assistant", "It does."), say("user", "Why?")]
NEXT = [*TALK, say("assistant", "Because of the slope."), say("user", "And then?")]


def prompt_of(messages: list[dict[str, Any]], **members: Any) -> Prompt:
    prompt = read_prompt(EndpointKind.CHAT, "chat", {"messages": messages, **members})
    assert prompt
    return prompt


def tokens(of: Prompt) -> int:
    return of.outline.size_bytes // 4


def decided(
    before: list[dict[str, Any]] | Prompt,
    now: list[dict[str, Any]] | Prompt,
    found: int,
    held: CachePlace = "slot",
    **more: Any,
) -> CacheFinding:
    earlier = before if isinstance(before, Prompt) else prompt_of(before)
    later = now if isinstance(now, Prompt) else prompt_of(now)
    is_same = more.pop("is_same", True)
    facts = CacheFacts(
        later,
        tokens(later),
        found,
        0,
        held,
        earlier=RecentPrompt(
            "req_1", 0, RUN, 0.0, tokens(earlier), earlier.blocks, earlier.outline, ()
        ),
        age_s=2.0,
        is_same_conversation=is_same,
    )
    return find_cause(facts._replace(**more))


def test_a_conversation_that_goes_on_from_its_slot_finds_all() -> None:
    found = decided(TALK, NEXT, tokens(prompt_of(TALK)) - 1)
    assert found.cause is Cause.ALL_FOUND
    assert "all that could be" in cache_sentence(found)
    assert advice(found.cause) is None


def test_a_changed_system_prompt_is_placed_by_message_and_token() -> None:
    changed = RULES[:400] + "Today is Monday. " + RULES[400:]
    now = [say("system", changed), *TALK[1:]]
    found = decided(TALK, now, 103)
    assert (found.cause, found.message, found.token) == (Cause.SYSTEM_PROMPT_CHANGED, 0, 104)
    assert not found.is_about
    total = tokens(prompt_of(now))
    assert cache_sentence(found._replace(repeated=2)) == (
        f"message 0 differs at token 104 of {total}: "
        "your client changes its system prompt on every request"
    )
    assert "in its request req_1" in cache_sentence(found)


def test_without_a_count_of_the_engine_the_token_is_an_estimate() -> None:
    changed = [say("system", RULES[:400] + "?" + RULES[400:]), *TALK[1:]]
    found = decided(TALK, changed, 0, "unknown")
    assert (found.cause, found.is_about) == (Cause.SYSTEM_PROMPT_CHANGED, True)
    assert found.token
    assert abs(found.token - 100) <= 17
    assert "at about token" in cache_sentence(found)


@pytest.mark.parametrize("is_same", [True, False])
def test_a_system_prompt_changed_between_conversations_is_one(*, is_same: bool) -> None:
    other = [say("system", RULES[:400] + "?" + RULES[400:]), say("user", "Hello?")]
    found = decided(TALK, other, 100, "unknown", is_same=is_same)
    assert found.cause is Cause.SYSTEM_PROMPT_CHANGED


def test_another_conversation_with_the_same_system_prompt_is_a_first_request() -> None:
    other = [TALK[0], say("user", STORY[:600].upper())]
    found = decided(TALK, other, 200, "unknown", is_same=False)
    assert found.cause is Cause.FIRST_REQUEST
    assert "shared with others" in cache_sentence(found)


@pytest.mark.parametrize(
    ("before", "now"), [("look", "read"), ("look", None), (None, "read"), ("look", "lookup")]
)
def test_changed_tools_are_told(before: str | None, now: str | None) -> None:
    def tools(name: str | None) -> dict[str, Any]:
        function = {"name": name, "description": "look at a page" * 9}
        return {"tools": [{"type": "function", "function": function}]} if name else {}

    found = decided(prompt_of(TALK, **tools(before)), prompt_of(NEXT, **tools(now)), 9)
    assert (found.cause, found.role) == (Cause.TOOLS_CHANGED, "tools")
    assert cache_sentence(found).startswith("the list of tools differs at token 10 of")


def test_a_history_without_its_oldest_messages_is_told() -> None:
    before = [*TALK, say("assistant", STORY), say("user", "And then?")]
    now = [TALK[0], *before[3:], say("assistant", "Then."), say("user", "Oh?")]
    found = decided(before, now, 202)
    assert (found.cause, found.message, found.dropped) == (Cause.HISTORY_TRUNCATED, 1, 2)
    assert "left out 2 messages" in cache_sentence(found)
    compacted = [TALK[0], say("user", "A summary."), *before[3:]]
    assert decided(before, compacted, 202).cause is Cause.HISTORY_TRUNCATED


def test_a_message_that_the_client_changed_is_told() -> None:
    now = [TALK[0], say("user", STORY[:100] + "!" + STORY[100:]), *TALK[2:]]
    long = [*now, say("assistant", STORY), say("user", "Go on.")]
    before = [*TALK, say("assistant", STORY), say("user", "Go on.")]
    found = decided(before, long, 225)
    assert (found.cause, found.message, found.role) == (Cause.MESSAGE_CHANGED, 1, "user")
    edited = [*TALK[:-1], say("user", "Why not?")]
    assert decided(TALK, edited, tokens(prompt_of(TALK)) - 4).cause is Cause.ALL_FOUND


@pytest.mark.parametrize(
    ("held", "kind", "cause"),
    [
        ("other", "any", Cause.OTHER_INSTANCE),
        ("taken", "any", Cause.SLOT_EVICTED),
        ("taken", "window", Cause.SLOT_EVICTED),
        ("busy", "any", Cause.SLOT_BUSY),
        ("unloaded", "any", Cause.MODEL_UNLOADED),
        ("crashed", "any", Cause.ENGINE_RESTARTED),
        ("slot", "window", Cause.SLIDING_WINDOW),
        ("slot", "recurrent", Cause.RECURRENT_STATE),
        ("slot", "any", Cause.NOT_FOUND),
    ],
)
def test_what_became_of_the_cache_is_told(held: CachePlace, kind: CacheKind, cause: Cause) -> None:
    found = decided(TALK, NEXT, 0, held, kind=kind)
    assert found.cause is cause
    assert found.lost == tokens(prompt_of(TALK))
    assert advice(cause)
    assert decided(TALK, NEXT, 0, held, kind=kind, is_cache_off=True).cause is Cause.CACHE_OFF


def test_a_window_is_the_cause_if_a_small_change_does_not_explain_the_loss() -> None:
    edited = [*TALK[:-1], say("user", "Why not?")]
    assert decided(TALK, edited, 0, kind="window").cause is Cause.SLIDING_WINDOW
    restarted = decided(TALK, edited, 0, "crashed")
    assert restarted.cause is Cause.ENGINE_RESTARTED


def test_the_first_request_tells_whether_its_conversation_began_before() -> None:
    facts = CacheFacts(prompt_of(TALK), tokens(prompt_of(TALK)), 0, 0, "unknown")
    found = find_cause(facts)
    assert (found.cause, found.lost) == (Cause.FIRST_REQUEST, 0)
    assert "first request of a conversation" in cache_sentence(found)
    assert "not seen" in cache_sentence(find_cause(facts._replace(is_continued=True)))
    shared = find_cause(facts._replace(expected_tokens=200))
    assert shared.cause is Cause.SLOT_EVICTED
    assert "held its beginning" in cache_sentence(shared)


def test_what_is_written_is_read_again_and_has_no_text() -> None:
    found = decided(TALK, [say("system", "Other."), *TALK[1:]], 0)
    fields = found.as_fields()
    assert cache_finding(fields) == found
    assert None not in fields.values()
    assert not any(text in str(fields) for text in ("Answer", "river", "Why"))
    assert cache_finding({**fields, "later": 1}) == found
    with pytest.raises(ValueError, match="weather"):
        cache_finding({**fields, "cause": "weather"})
