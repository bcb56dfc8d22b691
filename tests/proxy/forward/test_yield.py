"""A batch request gives up its slot for an interactive one, and goes on as if it had not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.proxy_harness import ProxyHarness, until
from support.requests import ask
from support.upstream import Call

from proxy.errors import Unfinished
from proxy.forward.second_request import Continuation, is_at_limit, may_yield, resumptions
from proxy.observe.record import AccessRecord, Timeline
from proxy.router.model_queue import yields_in_s
from proxy.upstream.upstream import Timings

MESSAGES = [{"role": "user", "content": "go"}]
PROMPT = 20
DONE = b"data: [DONE]\n\n"


def event(finish: str | None = None, *, name: str = "one", **more: Any) -> bytes:
    delta = {key: more.pop(key) for key in ("role", "content") if key in more}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + json.dumps({"id": name, "choices": [choice], **more}).encode() + b"\n\n"


def raw(text: str, finish: str | None = None, **more: Any) -> bytes:
    choice = {"index": 0, "text": text, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "one", "choices": [choice], **more}).encode() + b"\n\n"


def progress(
    total: int,
    cached: int,
    content: str | None = None,
    *,
    text: str | None = None,
    done: int | None = None,
) -> bytes:
    figures = {"total": total, "cache": cached, "processed": done or total, "time_ms": 1}
    if text is not None:
        return raw(text, prompt_progress=figures)
    return event(content=content, role="assistant", prompt_progress=figures)


def usage(prompt: int, completion: int) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": completion}
    return b"data: " + json.dumps({"id": "x", "choices": [], "usage": counts}).encode() + b"\n\n"


class Engine:
    """One slot whose batch answers are `a b c d e f`; it pauses after the third token.

    `holds` is how many tokens it finds of a prompt that it continues. With `done`, it pauses when
    it has computed so much of the first prompt.
    """

    def __init__(
        self,
        holds: int | None = None,
        tokens: Sequence[str] = ("a", "b", "c"),
        done: int | None = None,
    ) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.tokens = tokens
        self.begun_bytes = 0  # the tokens sent before it pauses
        self._holds = holds
        self._done = done
        self.may_end = asyncio.Event()

    async def speak(self, call: Call) -> None:
        body = json.loads(call.body)
        self.bodies.append(body)
        await call.begin_stream()
        if "prompt" in body:
            await self._complete(call, body["prompt"])
            return
        last = body["messages"][-1]
        if last["content"] == "now":
            await self._say(call, progress(9, 0), event(content="yes"), *end(9, 1, "stop"))
        elif last["role"] == "assistant":
            await self._go_on(call, last["content"])
        else:
            await self._begin(call)

    async def _begin(self, call: Call) -> None:
        is_first = sum(body["messages"] == MESSAGES for body in self.bodies) == 1
        texts = [event(content=token) for token in self.tokens]
        begun = [progress(PROMPT, 0), event(role="assistant", content=None), *texts]
        if is_first and self._done:
            begun = [progress(PROMPT, 0, done=self._done)]
        await self._chunks(call, *begun)
        self.begun_bytes = len(b"".join(begun))
        async with asyncio.TaskGroup() as group:
            waits: list[asyncio.Task[Any]] = [group.create_task(self.may_end.wait())]
            if is_first:
                waits.append(group.create_task(call.until_left()))
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        rest = [event(content=token) for token in "def"]
        await self._say(call, *rest, *end(PROMPT, len(self.tokens) + 3, "length"))

    async def _go_on(self, call: Call, text: str) -> None:
        total = PROMPT + len(self.tokens)
        cached = total - 1 if self._holds is None else self._holds
        rest = [event(content=token, name="two") for token in "def"]
        await self._say(call, progress(total, cached, text), *rest, *end(total, 3, "length"))

    async def _complete(self, call: Call, prompt: str) -> None:
        text = prompt.removeprefix("go")
        total = PROMPT + len(text)
        begun = [progress(total, total - 1, text=""), *(raw(piece) for piece in "abc")]
        rest = [*(raw(piece) for piece in "def"), raw("", "length")]
        if text:
            await self._say(call, begun[0], *rest, usage(total, 3), DONE)
        else:
            await self._chunks(call, *begun)
            self.begun_bytes = len(b"".join(begun))
            await call.until_left()

    async def _chunks(self, call: Call, *events: bytes) -> None:
        for piece in events:
            await call.chunk(piece)

    async def _say(self, call: Call, *events: bytes) -> None:
        await self._chunks(call, *events)
        await call.end()


def end(prompt: int, completion: int, finish: str) -> list[bytes]:
    return [event(finish), usage(prompt, completion), DONE]


async def serve(proxy: ProxyHarness, speak: Callable[[Call], Awaitable[None]]) -> None:
    fake = await proxy.fake(speak, is_admitted=False)
    upstream = fake.upstream(slots=1)
    # An engine that keeps copies of prompts that leave its slots.
    proxy.router.admit(
        replace(upstream, can_name_slots=True, host_cache_bytes=10**9, token_bytes=100)
    )


async def begun(proxy: ProxyHarness, engine: Engine) -> None:
    """Wait until the proxy has all that the engine sends before it pauses."""
    (instance,) = [entry for entry in proxy.router.registry if entry.upstream.slots == 1]
    await until(
        lambda: any(
            0 < engine.begun_bytes <= lease.progress.bytes_received for lease in instance.leases
        )
    )


async def interrupt(
    proxy: ProxyHarness, engine: Engine, **members: Any
) -> tuple[bytes, dict[str, Any]]:
    """Send a batch request and, in the middle of its answer, an interactive one.

    Returns the answer to the batch request and the figures of its event.
    """

    async def low() -> bytes:
        body = {"messages": MESSAGES, "service_tier": "flex", **members}
        async with proxy.ask(**body) as response:
            return await response.read()

    async with asyncio.TaskGroup() as group:
        batch = group.create_task(low())
        await begun(proxy, engine)
        async with proxy.ask(messages=[{"role": "user", "content": "now"}]) as response:
            assert (await response.json())["choices"][0]["message"]["content"] == "yes"
    await until(lambda: len(proxy.events("request.finished")) == 2)
    answer = batch.result()
    interactive, figures = proxy.events("request.finished")
    assert [interactive["priority"], figures["priority"]] == ["interactive", "batch"]
    return answer, figures


def text_of(stream: bytes) -> str:
    found = [json.loads(line[6:]) for line in stream.split(b"\n\n")[:-2]]
    assert {entry["id"] for entry in found if entry["choices"]} == {"one"}
    deltas = [entry["choices"][0]["delta"] for entry in found if entry["choices"]]
    assert sum("role" in delta for delta in deltas) == 1
    return "".join(delta.get("content") or "" for delta in deltas)


async def test_a_stream_pauses_for_an_interactive_request_and_goes_on(proxy: ProxyHarness) -> None:
    engine = Engine()
    await serve(proxy, engine.speak)
    answer, figures = await interrupt(proxy, engine, stream=True, temperature=0, max_tokens=6)
    assert text_of(answer) == "abcdef"
    assert answer.endswith(DONE)
    assert b'"completion_tokens":6' in answer.replace(b" ", b"")
    assert b'"prompt_tokens":20' in answer.replace(b" ", b"")
    _, now, rest = engine.bodies
    assert now["messages"][-1]["content"] == "now"
    assert rest["messages"] == [*MESSAGES, {"role": "assistant", "content": "abc"}]
    assert rest["max_tokens"] == 3
    assert (figures["yields"], figures["attempts"], figures["continued"]) == (1, 1, None)
    assert figures["paused_ms"] > 0
    assert not proxy.events("upstream.failed")


async def test_a_whole_answer_is_assembled_from_its_parts(proxy: ProxyHarness) -> None:
    engine = Engine()
    await serve(proxy, engine.speak)
    answer, figures = await interrupt(proxy, engine, temperature=0, max_tokens=6)
    body = json.loads(answer)
    assert body["choices"][0]["message"]["content"] == "abcdef"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == {"prompt_tokens": 20, "completion_tokens": 6}
    assert figures["yields"] == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_prompt_that_is_computed_stops_and_begins_again(
    proxy: ProxyHarness, *, stream: bool
) -> None:
    engine = Engine(done=9)
    await serve(proxy, engine.speak)
    answer, figures = await interrupt(proxy, engine, stream=stream)
    found = text_of(answer) if stream else json.loads(answer)["choices"][0]["message"]["content"]
    assert found == "abcdef"
    assert [body["messages"][-1]["content"] for body in engine.bodies] == ["go", "now", "go"]
    assert (figures["yields"], figures["attempts"]) == (1, 1)


async def test_a_paused_request_is_listed_and_its_handover_is_measured(
    proxy: ProxyHarness,
) -> None:
    engine, seen = Engine(), list[tuple[str, str]]()
    may_answer = asyncio.Event()

    async def speak(call: Call) -> None:
        if b"now" in call.body:
            await may_answer.wait()
        await engine.speak(call)

    await serve(proxy, speak)
    queue = proxy.router.queues["chat"]

    async def note_paused() -> None:
        await until(lambda: bool(queue.paused()))
        ((paused, paused_s),) = queue.paused()
        assert paused_s >= 0
        seen.append((paused.priority, paused.request_id))
        may_answer.set()

    async with asyncio.TaskGroup() as group:
        group.create_task(note_paused())
        _, figures = await interrupt(proxy, engine, stream=True, temperature=0, max_tokens=6)
    assert seen == [("batch", figures["request"])]
    assert not queue.paused()
    assert queue.handovers == 1
    assert queue.handovers_s > 0


async def test_a_paused_prompt_is_no_handover(proxy: ProxyHarness) -> None:
    """The time until its first token would be the prompt's own."""
    engine = Engine(done=9)
    await serve(proxy, engine.speak)
    await interrupt(proxy, engine)
    assert proxy.router.queues["chat"].handovers == 0


def test_what_a_stopped_prompt_had_computed_counts_as_computed() -> None:
    before, rest = Timings(8, 300, 900.0, 0, 0.0), Timings(340, 100, 300.0, 7, 70.0)
    assert rest.continuing(before) == Timings(40, 400, 1200.0, 7, 70.0)


async def test_the_rest_of_a_raw_completion_is_added(proxy: ProxyHarness) -> None:
    engine = Engine()
    await serve(proxy, engine.speak)
    path = {"path": "/v1/completions"}
    answer, figures = await interrupt(proxy, engine, **path, prompt="go", max_tokens=6)
    body = json.loads(answer)
    assert body["choices"][0]["text"] == "abcdef"
    assert body["usage"] == {"prompt_tokens": 20, "completion_tokens": 6}
    assert [body.get("max_tokens") for body in engine.bodies] == [6, None, 3]
    assert engine.bodies[-1]["prompt"] == "goabc"
    assert figures["yields"] == 1


@pytest.mark.parametrize("stream", [True, False])
async def test_a_greedy_answer_is_computed_again_if_its_tokens_are_lost(
    proxy: ProxyHarness, *, stream: bool
) -> None:
    engine = Engine(holds=4)
    await serve(proxy, engine.speak)
    answer, _ = await interrupt(proxy, engine, temperature=0, max_tokens=6, stream=stream)
    found = text_of(answer) if stream else json.loads(answer)["choices"][0]["message"]["content"]
    assert found == "abcdef"
    assert engine.bodies[-1]["messages"] == MESSAGES
    assert len(engine.bodies) == 4


def test_an_answer_that_is_computed_again_is_not_stopped_again() -> None:
    request = replace(ask("go"), may_yield=True)
    request.json = {"messages": MESSAGES, "temperature": 0}
    record = AccessRecord("r", Timeline())
    found = resumptions(request, record, Unfinished("abc", 3, "one", 20))
    assert [again.may_yield for again, _ in found] == [True, False, True]


async def test_a_sampled_answer_is_continued_even_so(proxy: ProxyHarness) -> None:
    engine = Engine(holds=4)
    await serve(proxy, engine.speak)
    answer, _ = await interrupt(proxy, engine, stream=True, max_tokens=6)
    assert text_of(answer) == "abcdef"
    assert engine.bodies[-1]["messages"][-1]["role"] == "assistant"


async def test_the_limit_counts_tokens_rather_than_events(proxy: ProxyHarness) -> None:
    """An event may have several tokens, such as those of a sign; the engine counts them."""
    engine = Engine(tokens=["a", "b", "あ"])
    engine.tokens = ["a", "b", "あ", ""]  # four tokens, three events with text
    await serve(proxy, engine.speak)
    answer, _ = await interrupt(proxy, engine, stream=True, temperature=0, max_tokens=9)
    assert text_of(answer) == "abあdef"
    assert [body.get("max_tokens") for body in engine.bodies] == [9, None, 6, 5]


@pytest.mark.parametrize(
    "members",
    [
        {"seed": 7},
        {"n": 2},
        {"tools": []},
        {"logprobs": True},
        {"mirostat": 2},
        {"response_format": {"type": "json_object"}},
        {"grammar": "root ::= [a-z]+"},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "x"}]},
    ],
)
def test_what_would_go_on_otherwise_runs_to_its_end(members: dict[str, Any]) -> None:
    request = ask("go")
    request.json = {"messages": MESSAGES, **members}
    request.slots = members.get("n", 1)
    assert not may_yield(request)


@pytest.mark.parametrize("members", [{}, {"temperature": 0}, {"temperature": 0, "seed": 7}])
def test_what_goes_on_exactly_may_yield(members: dict[str, Any]) -> None:
    request = ask("go")
    request.json = {"messages": MESSAGES, **members}
    assert may_yield(request)
    request.json = {**request.json, "max_tokens": 5}
    assert [is_at_limit(request, tokens) for tokens in (4, 5)] == [False, True]


@pytest.mark.parametrize(
    ("setting", "seed", "done"), [(False, None, None), (True, 7, None), (True, None, 10)]
)
async def test_a_request_that_may_not_yield_is_waited_for(
    proxy: ProxyHarness, *, setting: bool, seed: int | None, done: int | None
) -> None:
    """Among these is a prompt that the engine's next pass ends."""
    await proxy.open(batch_yields=setting)
    engine = Engine(done=done, tokens=("a", "b", "c")[: 0 if done else 3])
    await serve(proxy, engine.speak)
    members: dict[str, Any] = {} if seed is None else {"seed": seed}

    async def low() -> bytes:
        async with proxy.ask(messages=MESSAGES, service_tier="flex", **members) as response:
            return await response.read()

    async with asyncio.TaskGroup() as group:
        batch = group.create_task(low())
        await begun(proxy, engine)
        group.create_task(proxy.send())
        await until(lambda: bool(proxy.router.queues["chat"].waiting))
        engine.may_end.set()
    answer = json.loads(batch.result())["choices"][0]["message"]["content"]
    assert answer == "".join([*engine.tokens, "def"])
    assert proxy.events("request.finished")[0]["yields"] is None


@pytest.mark.parametrize(
    ("ran_s", "spent_s", "cost_s", "in_s"),
    [
        (0.0, 0.0, 0.1, 0.0),  # the first ones are free
        (0.0, 0.1, 0.1, 0.0),
        (0.0, 0.2, 0.1, 1.0),  # then a tenth of the time
        (0.4, 0.2, 0.1, 0.6),
        (9.0, 0.2, 0.1, 0.0),
        (60.0, 0.0, 60.0, 538.0),  # a token that is computed again
    ],
)
def test_what_yielding_wastes_is_a_tenth_of_the_time(
    ran_s: float, spent_s: float, cost_s: float, in_s: float
) -> None:
    assert yields_in_s(ran_s, spent_s, cost_s) == pytest.approx(in_s)


@pytest.mark.parametrize(
    ("is_replay", "text", "tokens", "expected"),
    [
        (False, "abcde", 2, ("abcde", 5)),
        (False, "abc", 0, ("abc", 3)),  # nothing new
        (True, "ab", 2, ("abc", 3)),  # the client has more
        (True, "abcd", 4, ("abcd", 4)),
    ],
)
def test_the_answer_so_far_is_the_clients_text(
    text: str, tokens: int, expected: tuple[str, int], *, is_replay: bool
) -> None:
    before = Unfinished("abc", 3, "one", 20)
    continuation = Continuation(AccessRecord("r", Timeline()), before, is_replay=is_replay)
    found = continuation.so_far(Unfinished(text, tokens, "two", 23))
    assert (found.text, found.tokens) == expected
    assert (found.id, found.prompt_tokens) == ("one", 20)
