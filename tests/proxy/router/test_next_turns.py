"""The beginning of a next turn is computed in its slot, while the engine is idle."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from support.proxy_harness import ProxyHarness, until
from support.upstream import Call

from proxy.request.chat_form import anthropic_chat
from proxy.router.next_turns import common_prefix

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
    return "".join(f"<{message['role']}>{text_of(message)}{call}" for message, call in calls)


def text_of(message: Mapping[str, Any]) -> str:
    content = message["content"]
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "<__media_7__>") for part in content)


@dataclass
class Engine:
    """Answers with `reply`; finds a prompt in its slot if that holds a beginning of it.

    With a micro batch, it goes back to the last checkpoint that a prompt has in common with the
    slot, and removes later ones.
    """

    reply: Mapping[str, Any]
    opens: str = ""  # the text with which its template begins an answer
    micro_batch: int = 0
    hangs: bool = False
    adds: str = ""  # the text that its translation adds to prompts of Anthropic's API
    held: list[int] = field(default_factory=list)
    chats: list[Mapping[str, Any]] = field(default_factory=list)
    rendered: list[Mapping[str, Any]] = field(default_factory=list)
    prefills: list[Mapping[str, Any]] = field(default_factory=list)
    left: asyncio.Event = field(default_factory=asyncio.Event)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    order: list[str] = field(default_factory=list)  # the turn that it began to compute
    checkpoints: set[int] = field(default_factory=set)
    found: list[int] = field(default_factory=list)  # of each prompt

    async def answer(self, call: Call) -> None:
        path, body = call.line.split()[1], json.loads(call.body or b"{}")
        if path == "/slots":
            held = {"id": SLOT, "id_task": len(self.chats), "n_prompt_tokens": len(self.held)}
            await _say(call, [{"id": 0, "id_task": -1}, held])
        elif path == "/apply-template":
            self.rendered.append(body)
            await _say(call, {"prompt": render(body["messages"]) + self.opens})
        elif path == "/tokenize":
            await _say(call, {"tokens": list(body["content"].encode())})
        elif path == "/completion" and body["prompt"] == [[]]:  # a slot is refreshed
            await _say(call, {})
        elif path == "/completion":
            await self._prefill(call, body)
        elif path == "/v1/messages":
            await self._message(call, body)
        else:
            self.chats.append(body)
            self.order.append("chat")
            if self.hangs and len(self.chats) > 1:
                await self.may_answer.wait()
                self.order.append("answer")
            prompt = render(body["messages"]) + self.opens
            timings = self._compute(list(prompt.encode()), prompt.rfind("<user>"))
            self.held += [0] * 40  # the answer with its reasoning
            choice = {"index": 0, "message": self.reply, "finish_reason": "stop"}
            timings["predicted_n"] = 40
            await _say(call, {"choices": [choice], "timings": timings})

    async def _prefill(self, call: Call, body: dict[str, Any]) -> None:
        self.prefills.append(body)
        self.order.append("ahead")
        await call.begin_stream()
        if self.hangs:
            await call.until_left()
            self.left.set()
            return
        prompt = body["prompt"]
        if isinstance(prompt, dict):
            prompt = list(prompt["prompt_string"].encode())
        timings = self._compute(prompt)
        await call.chunk(b"data: " + json.dumps({"timings": timings}).encode() + b"\n\n")
        await call.end()

    async def _message(self, call: Call, body: dict[str, Any]) -> None:
        """Answer in Anthropic's API."""
        self.chats.append(body)
        chat = anthropic_chat({**body, "system": self.adds} if self.adds else body)
        timings = self._compute(list(render(chat["messages"]).encode()))
        self.held += [0] * 40
        usage = {
            "input_tokens": timings["prompt_n"],
            "cache_read_input_tokens": timings["cache_n"],
            "output_tokens": 40,
        }
        await _say(call, {"type": "message", "content": self.reply["content"], "usage": usage})

    def _compute(self, prompt: list[int], user: int = 0) -> dict[str, int]:
        """Compute a prompt, whose last user's message begins at `user`."""
        common = len(common_prefix(prompt, self.held))
        self.checkpoints = {at for at in self.checkpoints if at <= common}
        found = max(self.checkpoints, default=0)
        if common == len(self.held):
            found = common
        computed = len(prompt) - found
        if self.micro_batch:
            ends = {len(prompt) - 4 - self.micro_batch, len(prompt) - 4, user}
            self.checkpoints |= {found, *(at for at in ends if at > found)}
        self.held = prompt
        self.found.append(found)
        return {"cache_n": found, "prompt_n": computed, "prompt_ms": 2 * computed}


async def _say(call: Call, members: object) -> None:
    body = json.dumps(members).encode()
    await call.head("Content-Type: application/json", f"Content-Length: {len(body)}")
    await call.send(body)


async def serve(proxy: ProxyHarness, engine: Engine, *, is_recurrent: bool = True) -> None:
    fake = await proxy.fake(engine.answer, is_admitted=False)
    fake.says_slots = False
    proxy.router.admit(
        replace(
            fake.upstream(),
            can_name_slots=True,
            resumable_prompts=4 * is_recurrent,
            micro_batch_tokens=engine.micro_batch,
        )
    )


async def chat(
    proxy: ProxyHarness, messages: list[Any], page: str = "/v1/chat/completions"
) -> None:
    async with proxy.http.post(page, json={"model": "chat", "messages": messages}) as response:
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
    ahead = next(use for use in proxy.keep_alives.uses if use.client == "(ahead)")
    assert (ahead.tokens.prompt, ahead.is_exact) == (len(begins), True)


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
    engine, uses = Engine(REPLY, hangs=True), proxy.keep_alives.uses
    engine.may_answer.set()
    await serve(proxy, engine)
    await chat(proxy, next_turn(REPLY)[:1])
    await until(lambda: bool(engine.prefills))
    await chat(proxy, next_turn({"role": "assistant", "content": " a river "}))
    await engine.left.wait()
    assert engine.chats[1]["id_slot"] == engine.prefills[0]["id_slot"] == SLOT
    assert proxy.router.next_turns.counts["chat"].aborted >= 1
    await until(lambda: ("(ahead)", False) in [(use.client, use.is_exact) for use in uses])


@pytest.mark.parametrize("is_recurrent", [True, False])
async def test_nothing_is_computed_ahead_from_the_arrival_of_a_request_to_its_answer(
    proxy: ProxyHarness, *, is_recurrent: bool
) -> None:
    """The engine's own order of prompts tells it, whatever the machine's speed."""
    engine = Engine({**REPLY, "content": "a river " * 40}, hangs=True)
    await serve(proxy, engine, is_recurrent=is_recurrent)
    await chat(proxy, next_turn(REPLY)[:1])
    await until(lambda: bool(engine.prefills))
    async with asyncio.TaskGroup() as group:
        group.create_task(chat(proxy, [{"role": "user", "content": "another " * 99}]))
        await engine.left.wait()
        await until(lambda: len(engine.chats) == 2)
        engine.may_answer.set()
    assert engine.order[:4] == ["chat", "ahead", "chat", "answer"]


async def test_an_answer_with_a_call_is_followed_by_its_result(proxy: ProxyHarness) -> None:
    engine = Engine(CALLED)
    await serve(proxy, engine)
    await chat(proxy, next_turn(CALLED)[:1])
    await until(lambda: bool(proxy.events("next_turn.computed")))
    assert bytes(engine.prefills[-1]["prompt"]).endswith(b"]<tool>")


THOUGHT = {"type": "thinking", "thinking": "hm " * 20, "signature": ""}
SAID = {"role": "assistant", "content": [THOUGHT, {"type": "text", "text": "a river"}]}


async def test_what_a_next_turn_of_anthropics_api_begins_with_is_found(
    proxy: ProxyHarness,
) -> None:
    engine = Engine(SAID)
    await serve(proxy, engine)
    await chat(proxy, next_turn(SAID)[:1], "/v1/messages")
    await until(lambda: bool(proxy.events("next_turn.computed")))
    begins = bytes(engine.prefills[0]["prompt"]).decode()
    answer = {"role": "assistant", "content": "a river"}
    assert begins == render([*next_turn(answer)[:2]]) + "<user>"
    await chat(proxy, next_turn(SAID), "/v1/messages")
    await until(lambda: len(proxy.events("request.finished")) == 2)
    cache = proxy.events("request.finished")[1]["cache"]
    assert cache["found"] == cache["ahead"] == len(begins)


async def test_pictures_are_computed_ahead_with_the_text_around_them(proxy: ProxyHarness) -> None:
    engine, url = Engine(REPLY), "data:image/png;base64,AAAA"
    await serve(proxy, engine)
    picture = {"type": "image_url", "image_url": {"url": url}}
    content = [{"type": "text", "text": STORY}, picture, {"type": "text", "text": "what?"}]
    await chat(proxy, [{"role": "user", "content": content}])
    await until(lambda: bool(proxy.events("next_turn.computed")))
    (prefill,) = engine.prefills
    assert prefill["prompt"]["multimodal_data"] == ["AAAA"]
    assert prefill["prompt"]["prompt_string"].endswith('what?""<assistant> a river ""<user>')


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://a/b.png"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
    ],
)
async def test_of_other_media_and_links_nothing_is_computed_ahead(
    proxy: ProxyHarness, part: Mapping[str, Any]
) -> None:
    engine = Engine(REPLY)
    await serve(proxy, engine)
    await chat(proxy, [{"role": "user", "content": [{"type": "text", "text": STORY}, part]}])
    await until(lambda: bool(proxy.events("request.finished")))
    assert not proxy.router.next_turns.due


async def test_nothing_is_computed_ahead_if_a_build_translates_prompts_in_another_way(
    proxy: ProxyHarness,
) -> None:
    engine = Engine(SAID, adds="be brief")
    await serve(proxy, engine)
    await chat(proxy, next_turn(SAID)[:1], "/v1/messages")
    await until(lambda: bool(engine.rendered) and not proxy.router.next_turns.due)
    assert not engine.prefills


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


@pytest.mark.parametrize("asked", [STORY, "why?"])
async def test_a_recurrent_model_is_computed_in_chunks_from_its_last_checkpoint(
    proxy: ProxyHarness, asked: str
) -> None:
    engine = Engine(
        {**REPLY, "content": "a river " * 20}, opens="<assistant>" + "hm" * 9, micro_batch=150
    )
    await serve(proxy, engine)
    messages = [{"role": "system", "content": STORY}, {"role": "user", "content": asked}]
    await chat(proxy, messages)
    await until(lambda: bool(proxy.events("next_turn.computed")))
    prompt = render(messages) + engine.opens
    checkpoint = len(prompt) - 4 - 150 if asked == STORY else prompt.index("<user>")
    sizes = [len(prefill["prompt"]) for prefill in engine.prefills]
    assert engine.found == [0, checkpoint, *sizes[:-1]]
    assert len(sizes) > 2
    computed = [end - begin for begin, end in zip(engine.found[1:], sizes, strict=True)]
    assert max(computed) <= 50 + len("<user>")  # a tenth of a second


async def test_a_recurrent_model_continues_an_answer_that_its_template_keeps(
    proxy: ProxyHarness,
) -> None:
    engine = Engine({**REPLY, "content": "a river " * 20}, micro_batch=150)
    await serve(proxy, engine)
    await chat(proxy, next_turn(REPLY)[:1])
    await until(lambda: bool(proxy.events("next_turn.computed")))
    held = len(render(next_turn(REPLY)[:1])) + 40
    assert len(engine.prefills[0]["prompt"]) > held


async def test_work_that_was_aborted_goes_on_where_it_ended(proxy: ProxyHarness) -> None:
    engine = Engine(
        {**REPLY, "content": "a river " * 40}, opens="<assistant>" + "hm" * 9, micro_batch=150
    )
    engine.hangs = True
    engine.may_answer.set()
    await serve(proxy, engine)
    await chat(proxy, next_turn(REPLY)[:1])
    await until(lambda: bool(engine.prefills))
    await chat(proxy, [{"role": "user", "content": "another " * 99}])
    await until(lambda: len(engine.prefills) == 2)
    first, second = (len(prefill["prompt"]) for prefill in engine.prefills)
    assert second > first


async def test_no_share_of_time_computes_nothing(proxy: ProxyHarness) -> None:
    await proxy.open(ahead_share=0)
    engine = Engine(REPLY)
    await serve(proxy, engine)
    await chat(proxy, next_turn(REPLY)[:1])
    assert not proxy.router.next_turns.due


def test_what_two_prompts_have_in_common() -> None:
    assert common_prefix([1, 2], [1, 2, 3]) == [1, 2]
    assert common_prefix([1, 2], [1, 3, 2]) == [1]


@pytest.mark.parametrize("allowed", [False, True])
async def test_on_the_battery_next_turns_are_computed_if_the_settings_allow_it(
    proxy: ProxyHarness, *, allowed: bool
) -> None:
    await proxy.open(ahead_on_battery=allowed)
    proxy.is_on_battery = True
    engine = Engine(REPLY)
    await serve(proxy, engine)
    await chat(proxy, next_turn(REPLY)[:1])
    await until(lambda: bool(proxy.events("request.finished")))
    await until(lambda: not proxy.router.next_turns.due)
    assert bool(engine.prefills) is allowed
