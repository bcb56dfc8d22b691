"""What a next turn begins with is computed in its slot, while the engine is idle."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from support.proxy_harness import ProxyHarness, until
from support.upstream import Call

from proxy.router.next_turns import Given, SentBack, common_prefix, next_messages

SLOT = 1  # the engine begins with the last one
STORY = "words " * 100
REPLY = {"role": "assistant", "content": " a river ", "reasoning_content": "hm " * 20}
CALLED = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    ],
}


def render(messages: Sequence[Mapping[str, Any]]) -> str:
    """Write messages as a template does that leaves out the reasoning."""
    calls = ((message, json.dumps(message.get("tool_calls", ""))) for message in messages)
    return "".join(f"<{message['role']}>{message['content']}{call}" for message, call in calls)


@dataclass
class Engine:
    """Answers with `reply`; finds a prompt in its slot if that holds a beginning of it."""

    reply: Mapping[str, Any]
    hangs: bool = False
    held: list[int] = field(default_factory=list)
    chats: list[Mapping[str, Any]] = field(default_factory=list)
    prefills: list[Mapping[str, Any]] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def answer(self, call: Call) -> None:
        path, body = call.line.split()[1], json.loads(call.body or b"{}")
        if path == "/slots":
            held = {"id": SLOT, "id_task": len(self.chats), "n_prompt_tokens": len(self.held)}
            await _say(call, [{"id": 0, "id_task": -1}, held])
        elif path == "/apply-template":
            await _say(call, {"prompt": render(body["messages"])})
        elif path == "/tokenize":
            await _say(call, {"tokens": list(body["content"].encode())})
        elif path == "/completion":
            self.prefills.append(body)
            await call.begin_stream()
            if self.hangs:
                await call.until_left()
                self.left.set()
                return
            timings = self._compute(body["prompt"])
            await call.chunk(b"data: " + json.dumps({"timings": timings}).encode() + b"\n\n")
            await call.end()
        else:
            self.chats.append(body)
            timings = self._compute(list(render(body["messages"]).encode()))
            self.held += [0] * 40  # the answer with its reasoning
            choice = {"index": 0, "message": self.reply, "finish_reason": "stop"}
            timings["predicted_n"] = 40
            await _say(call, {"choices": [choice], "timings": timings})

    def _compute(self, prompt: list[int]) -> dict[str, int]:
        found = len(self.held) if prompt[: len(self.held)] == self.held else 0
        self.held = prompt
        computed = len(prompt) - found
        return {"cache_n": found, "prompt_n": computed, "prompt_ms": 2 * computed}


async def _say(call: Call, members: object) -> None:
    body = json.dumps(members).encode()
    await call.head("Content-Type: application/json", f"Content-Length: {len(body)}")
    await call.send(body)


async def serve(proxy: ProxyHarness, engine: Engine, *, is_recurrent: bool = True) -> None:
    fake = await proxy.fake(engine.answer, is_admitted=False)
    fake.says_slots = False
    proxy.router.admit(
        replace(fake.upstream(), can_name_slots=True, resumable_prompts=4 * is_recurrent)
    )


async def chat(proxy: ProxyHarness, messages: list[Any]) -> None:
    async with proxy.ask(messages=messages) as response:
        assert response.status == 200
        await response.read()


def next_turn(sent: Mapping[str, Any]) -> list[Any]:
    after = {"role": "user", "content": "and then?"}
    return [{"role": "user", "content": STORY}, sent, after]


async def test_what_any_next_turn_begins_with_is_computed_in_its_slot_and_found(
    proxy: ProxyHarness,
) -> None:
    engine = Engine(REPLY)
    await serve(proxy, engine)
    await chat(proxy, next_turn(REPLY)[:1])
    await until(lambda: bool(proxy.events("next_turn.computed")))
    (prefill,) = engine.prefills
    begins = bytes(prefill["prompt"]).decode()
    assert (
        begins == render([*next_turn({"role": "assistant", "content": " a river "})[:2]]) + "<user>"
    )
    assert (prefill["n_predict"], prefill["id_slot"]) == (0, SLOT)
    await chat(proxy, next_turn({"role": "assistant", "content": " a river "}))
    await until(lambda: len(proxy.events("request.finished")) == 2)
    cache = proxy.events("request.finished")[1]["cache"]
    assert cache["found"] == cache["ahead"] == len(begins)
    counts = proxy.router.next_turns.counts["chat"]
    assert (counts.computed_tokens, counts.used_tokens) == (len(begins), len(begins))


async def test_a_wrong_guess_is_counted_and_the_next_one_is_right(proxy: ProxyHarness) -> None:
    engine = Engine(REPLY)
    await serve(proxy, engine)
    await chat(proxy, next_turn(REPLY)[:1])
    await until(lambda: bool(proxy.events("next_turn.computed")))
    history = next_turn({"role": "assistant", "content": "a river"})  # a client that trims
    await chat(proxy, history)
    counts = proxy.router.next_turns.counts["chat"]
    await until(lambda: counts.computed == 2)
    assert counts.missed_tokens > 0 == counts.used_tokens
    await chat(proxy, [*history, *next_turn({"role": "assistant", "content": "a river"})[1:]])
    await until(lambda: counts.used_tokens > 0)


async def test_a_request_aborts_the_work_at_once_and_has_its_slot(proxy: ProxyHarness) -> None:
    engine = Engine(REPLY, hangs=True)
    await serve(proxy, engine)
    await chat(proxy, next_turn(REPLY)[:1])
    await until(lambda: bool(engine.prefills))
    await chat(proxy, next_turn({"role": "assistant", "content": " a river "}))
    await engine.left.wait()
    assert engine.chats[1]["id_slot"] == engine.prefills[0]["id_slot"] == SLOT
    assert proxy.router.next_turns.counts["chat"].aborted >= 1


async def test_an_answer_with_a_call_is_followed_by_its_result(proxy: ProxyHarness) -> None:
    engine = Engine(CALLED)
    await serve(proxy, engine)
    await chat(proxy, next_turn(CALLED)[:1])
    await until(lambda: bool(proxy.events("next_turn.computed")))
    assert bytes(engine.prefills[0]["prompt"]).endswith(b"]<tool>")


async def test_a_model_that_continues_any_prefix_computes_no_plain_answer_ahead(
    proxy: ProxyHarness,
) -> None:
    engine = Engine({"role": "assistant", "content": "a river " * 40})
    await serve(proxy, engine, is_recurrent=False)
    await chat(proxy, next_turn(REPLY)[:1])
    assert not proxy.router.next_turns.due


async def test_a_model_that_continues_any_prefix_is_computed_in_chunks(
    proxy: ProxyHarness,
) -> None:
    engine = Engine({**REPLY, "content": "a river " * 40})
    await serve(proxy, engine, is_recurrent=False)
    await chat(proxy, next_turn(REPLY)[:1])
    await until(lambda: bool(proxy.events("next_turn.computed")))
    sizes = [len(prefill["prompt"]) for prefill in engine.prefills]
    assert len(sizes) > 1
    assert sizes == sorted(sizes)
    assert sizes[0] > len(STORY)


async def test_no_share_of_time_computes_nothing(proxy: ProxyHarness) -> None:
    await proxy.open(ahead_share=0)
    engine = Engine(REPLY)
    await serve(proxy, engine)
    await chat(proxy, next_turn(REPLY)[:1])
    assert not proxy.router.next_turns.due


@pytest.mark.parametrize(
    ("reply", "sent", "known"),
    [
        (REPLY, {"content": " a river "}, SentBack()),
        (REPLY, {"content": "a river"}, SentBack(is_trimmed=True)),
        (REPLY, {"content": "another"}, SentBack()),
        (REPLY, {"content": " a river ", "reasoning_content": "h"}, SentBack(has_reasoning=True)),
        (CALLED, {"content": None}, SentBack(has_null=True)),
        (CALLED, {"content": ""}, SentBack()),
    ],
)
def test_what_a_client_sends_back_is_learned(
    reply: Mapping[str, Any], sent: Mapping[str, Any], known: SentBack
) -> None:
    assert SentBack().after(Given.of(reply), sent) == known


def test_the_message_that_a_client_sends_back() -> None:
    trimmed = SentBack(is_trimmed=True, has_reasoning=True).message(REPLY)
    assert trimmed == {**REPLY, "content": "a river"}
    assert "reasoning_content" not in SentBack().message(REPLY)
    assert SentBack(has_null=True).message(CALLED) == {**CALLED, "content": None}


def test_two_next_turns_differ_from_their_last_message_on() -> None:
    first, second = next_messages([{"role": "user", "content": "a"}], REPLY)
    assert first[:-1] == second[:-1]
    prompts = (list(render(messages).encode()) for messages in (first, second))
    assert bytes(common_prefix(*prompts)).endswith(b"<user>")
    assert common_prefix([1, 2], [1, 2, 3]) == [1, 2]
