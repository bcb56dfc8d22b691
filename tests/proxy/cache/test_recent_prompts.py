"""The previous prompt is found although the client changed its beginning."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.cache.holders import Conversation, Run
from proxy.cache.miss_cause import RecentPrompt, RecentPrompts, client_hash, recent_prompt
from proxy.cache.prompt import Prompt, read_prompt
from proxy.observe.cache_finding import CacheFinding, Cause
from proxy.upstream.endpoint_kinds import EndpointKind

RULES = "Answer briefly, and only what you know. " * 20
ME, OTHER = client_hash("chat", "me"), client_hash("chat", "you")
RUN = Run("chat.0", (), 1)


def answer_to(user: str) -> dict[str, Any]:
    return {"role": "assistant", "content": user[::-1]}


def chat(system: str, *users: str) -> Prompt:
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
    for user in users:
        messages += [
            {"role": "user", "content": user},
            {"role": "assistant", "content": user[::-1]},
        ]
    read = read_prompt(EndpointKind.CHAT, "chat", {"messages": messages[:-1]})
    assert read
    return read


def add(recent: RecentPrompts, system: str, *users: str, client: int = ME) -> RecentPrompt:
    prompt, answer = chat(system, *users), answer_to(users[-1])
    made = recent_prompt("req_1", RUN, prompt, answer, (1.0, prompt.tokens), client)
    recent.add(Conversation("chat", RUN), made)
    return made


QUESTIONS = ("what is the river called that we saw", "and the mountain behind it, the high one")


@pytest.fixture
def recent() -> RecentPrompts:
    return RecentPrompts()


def test_a_conversation_is_found_by_its_messages(recent: RecentPrompts) -> None:
    made = add(recent, RULES, *QUESTIONS)
    again = chat("Other rules.", *QUESTIONS, "thank you for that, it was what I meant")
    assert recent.find(ME, again, None) == (made, True)
    truncated = chat(RULES, QUESTIONS[1], "thank you for that, it was what I meant")
    assert recent.find(ME, truncated, None) == (made, True)
    assert recent.find(OTHER, again, None) == (None, False)


def test_of_several_with_a_common_message_the_one_with_most_of_the_history(
    recent: RecentPrompts,
) -> None:
    common = "please go on with what you were saying before"
    made = add(recent, RULES, *QUESTIONS, common)
    add(recent, "Rules.", "a question of another conversation altogether", common)
    found = recent.find(ME, chat("Changed.", *QUESTIONS, common, "and what after that?"), None)
    assert found == (made, True)


def test_a_new_conversation_is_compared_with_the_clients_latest_that_begins_so(
    recent: RecentPrompts,
) -> None:
    made = add(recent, RULES, "the first question of this conversation")
    add(recent, "Wholly other rules.", "the first question of that conversation")
    found, is_same = recent.find(
        ME, chat(f"{RULES[:400]}?", "another question, not asked yet"), None
    )
    assert (found, is_same) == (made, False)


def test_the_store_is_bounded() -> None:
    recent = RecentPrompts(hashes_max=200)
    made = [add(recent, RULES, f"question number {number} of many") for number in range(30)]
    assert len(recent) <= 200
    assert recent.find(ME, chat("Other rules. " * 12, "question number 0 of many"), None) == (
        None,
        False,
    )
    assert recent.find(ME, chat("Other rules. " * 12, "question number 29 of many"), None) == (
        made[-1],
        True,
    )


def test_equal_causes_of_a_client_are_counted(recent: RecentPrompts) -> None:
    assert [recent.count_repetitions(ME, prompt) for prompt in "aab"] == [1, 2, 1]
    assert recent.count_repetitions(OTHER, "b") == 1


def tools(*names: str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name}} for name in names]


def test_changes_are_named_exactly_only_against_the_prompt_that_is_remembered(
    recent: RecentPrompts,
) -> None:
    def change(before: list[dict[str, Any]], now: list[dict[str, Any]]) -> str:
        system = {"role": "system", "content": RULES}
        members = [{"messages": [system], "tools": given} for given in (before, now)]
        earlier, later = (read_prompt(EndpointKind.CHAT, "chat", given) for given in members)
        assert earlier
        assert later
        kept = recent_prompt("a", RUN, earlier, None, (0.0, 100), ME)
        found = CacheFinding(Cause.TOOLS_CHANGED, 100, 0, 100, role="tools")
        found = recent.with_changes(found, kept, later, EndpointKind.CHAT, members[1])
        return found.changes[0][0]

    assert change(tools("a", "b"), tools("b", "a")) == "tools"
    assert change(tools("b", "a"), tools("a", "b")) == "order"
    assert change([], tools("b", "a")) == "tools"
