"""The workloads of a bench: the requests that each sends, and the choice of those for a model.

Their descriptions and figures are in `standard_workloads.toml`.

On an engine that matches no prompts to slots, turns name their slot, as the proxy does
(proxy/cache/slot_map.py and proxy/router/slots.py).

The workload `yours` replays the sizes, pauses and overlap of the requests that the daemon recorded.
Its prompts are plain words, given as tokens, so their sizes are exact with any template. Each
conversation continues from the answers it gets.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from random import Random
from types import MappingProxyType
from typing import Final

import orjson
from attrs import define, field

from proxy.common.toml_text import table_beside
from proxy.upstream.engine_state import SlotState
from proxy.upstream.upstream import Timings
from supervisor.bench import workload as send
from supervisor.bench.figures import Figure, median_rate, percentile
from supervisor.bench.workload import (
    WORDS,
    MeasuredEngine,
    Message,
    Outcome,
    ReplayedRequest,
    Reply,
    Workload,
    WorkloadFailed,
    plan_replay,
    rate,
    text,
    without_none,
)
from supervisor.builds.help import nearest
from supervisor.engine.client import EngineClient, ErrorResponse, get_slots, refresh_slot
from supervisor.errors import SettingsInvalid
from supervisor.plan.plan import Plan
from supervisor.records.requests import RecordedRequest


async def last_used_slot(client: EngineClient) -> int | None:
    """Return the slot of the latest request, or None if the engine does not report it."""
    slots = await _by_use(client)
    return slots[-1].id_slot if slots else None


async def save_idle_slots(client: EngineClient) -> None:
    """Have an idle engine save its slots to the host cache, before a new conversation.

    A request without tokens in the least recently used slot saves the contents of the others. The
    others are then used after it, so that this slot stays the next conversation's.
    """
    for slot in await _by_use(client):
        await refresh_slot(client, slot.id_slot)


async def _by_use(client: EngineClient) -> list[SlotState]:
    """Return the slots, least recently used first; of unused ones the engine takes the last."""
    slots = await get_slots(client)
    if isinstance(slots, ErrorResponse):
        return []
    return sorted(slots, key=lambda slot: (slot.task, -slot.id_slot))


_COMPLETION: Final = "/completion"
_ANSWER_TOKENS: Final = 8


async def _run_batch(engine: MeasuredEngine, rng: Random) -> Outcome:
    sizes = engine.sizes
    words = sizes.words(2 * sizes.question)
    body = {
        "prompt": [text(rng, words) for _ in range(sizes.batch_prompts)],
        "n_predict": _ANSWER_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
    }
    began_s = time.perf_counter()
    async with engine.client() as client:
        answer = orjson.loads(await send.post(client, _COMPLETION, body))
    took_s = time.perf_counter() - began_s
    found = _timings(answer if isinstance(answer, list) else [answer])
    tokens = sum(answer.prompt_tokens + answer.decoded_tokens for answer in found)
    return {"batch.total_rate": tokens / took_s}, tokens


def _timings(answers: Iterable[object]) -> list[Timings]:
    found = []
    for answer in answers:
        timings = Timings.read(answer.get("timings")) if isinstance(answer, dict) else None
        if timings is None:
            raise WorkloadFailed(f"{_COMPLETION}: an answer without timings")
        found.append(timings)
    return found


def _spread(name: str, took_ms: Sequence[float], suffix: str = "") -> dict[str, float]:
    return {
        f"{name}_p50{suffix}": percentile(took_ms, 0.5),
        f"{name}_p95{suffix}": percentile(took_ms, 0.95),
    }


_CONVERSATIONS: Final = 2


def _reply_values(workload: str, replies: Sequence[Reply]) -> dict[str, float | None]:
    return {
        **_spread(f"{workload}.first_token", [reply.first_token_ms for reply in replies]),
        f"{workload}.decode_rate": median_rate([reply.decode_rate for reply in replies]),
        f"{workload}.prompt_tokens": sum(reply.timings.prompt_tokens for reply in replies),
    }


async def _run_chat(engine: MeasuredEngine, rng: Random) -> Outcome:
    system = text(rng, engine.sizes.words(engine.sizes.system))
    async with engine.client() as client:
        replies = [
            reply
            for _ in range(_CONVERSATIONS)
            for reply in await _conversation(client, system, engine, rng)
        ]
    return without_none(_reply_values("chat", replies)), sum(reply.tokens for reply in replies)


async def _conversation(
    client: EngineClient, system: str, engine: MeasuredEngine, rng: Random
) -> list[Reply]:
    sizes, replies = engine.sizes, list[Reply]()
    messages: list[Message] = [{"role": "system", "content": system}]
    id_slot: int | None = None
    if engine.names_slots:
        await save_idle_slots(client)
    for turn in range(sizes.turns):
        messages.append({"role": "user", "content": text(rng, sizes.words(sizes.question))})
        replies.append(await send.chat(client, messages, sizes.answer, id_slot))
        messages.append({"role": "assistant", "content": replies[-1].text})
        if turn == 0 and engine.names_slots:
            id_slot = await last_used_slot(client)
    return replies


_REQUESTS_EACH: Final = 2
# Suffix of a figure's name → clients per slot.
_LOADS: Final[Mapping[str, int]] = {"": 1, "_twice": 2}


async def _run_concurrent(engine: MeasuredEngine, rng: Random) -> Outcome:
    values: dict[str, float] = {}
    tokens = 0
    system = text(rng, engine.sizes.words(engine.sizes.system))
    words = engine.sizes.words(engine.sizes.question)
    for suffix, factor in _LOADS.items():
        clients = [
            [
                [
                    {"role": "system", "content": system},
                    {"role": "user", "content": text(rng, words)},
                ]
                for _ in range(_REQUESTS_EACH)
            ]
            for _ in range(factor * engine.sizes.slots)
        ]
        began_s = time.perf_counter()
        answers = await send.run_together([_client(engine, requests) for requests in clients])
        took_s = time.perf_counter() - began_s
        replies = [reply for answer in answers for reply in answer]
        generated = sum(reply.timings.decoded_tokens for reply in replies)
        values[f"concurrent.total_rate{suffix}"] = generated / took_s
        first_ms = [reply.first_token_ms for reply in replies]
        values |= _spread("concurrent.first_token", first_ms, suffix)
        tokens += sum(reply.tokens for reply in replies)
    return values, tokens


async def _client(engine: MeasuredEngine, requests: Sequence[Sequence[Message]]) -> list[Reply]:
    async with engine.client() as client:
        return [await send.chat(client, messages, engine.sizes.answer) for messages in requests]


_EMBEDDINGS: Final = "/v1/embeddings"
_TEXTS: Final = 8


async def _run_embedding(engine: MeasuredEngine, rng: Random) -> Outcome:
    words = engine.sizes.words(engine.sizes.embedded // 2)
    took_ms, tokens = list[float](), 0
    async with engine.client() as client:
        for _ in range(_TEXTS):
            began_s = time.perf_counter()
            tokens += await _embed(client, [text(rng, words)])
            took_ms.append(1000 * (time.perf_counter() - began_s))
        began_s = time.perf_counter()
        together = await _embed(client, [text(rng, words) for _ in range(2 * _TEXTS)])
        rate = together / (time.perf_counter() - began_s)
    values = _spread("embedding.latency", took_ms) | {"embedding.total_rate": rate}
    return values, tokens + together


async def _embed(client: EngineClient, texts: Sequence[str]) -> int:
    answer = orjson.loads(await send.post(client, _EMBEDDINGS, {"input": texts}))
    match answer:
        case {"usage": {"prompt_tokens": int(tokens)}}:
            return tokens
        case _:
            raise WorkloadFailed(f"{_EMBEDDINGS}: an answer without its number of tokens")


async def _complete(
    engine: MeasuredEngine, rng: Random, workload: str, prompt_tokens: int, answer_tokens: int
) -> Outcome:
    prompt = text(rng, engine.sizes.words(prompt_tokens))
    async with engine.client() as client:
        reply = await send.complete(client, prompt, answer_tokens)
    timings = reply.timings
    if answer_tokens > 1:
        speed = {f"{workload}.decode_rate": reply.decode_rate}
    else:
        speed = {f"{workload}.prefill_rate": rate(timings.prompt_tokens, timings.prompt_ms)}
    return without_none({f"{workload}.first_token": reply.first_token_ms, **speed}), reply.tokens


_REQUESTS_MIN: Final = 8
# Of the long prompt and the generation, each of which takes about 2 s on the fastest variant.
_SHARES: Final = 6


def reason_unavailable(model: str, recorded: Sequence[RecordedRequest]) -> str | None:
    """Return why nothing can be replayed for a model, as a clause, or None."""
    if (count := len(recorded)) >= _REQUESTS_MIN:
        return None
    noun = "request is" if count == 1 else "requests are"
    return (
        f"{count} {noun} recorded of {model}, and {_REQUESTS_MIN} are needed; the daemon records "
        "answered requests while record_requests is on (corral record show)"
    )


async def _run_yours(engine: MeasuredEngine, rng: Random) -> Outcome:
    requests = plan_replay(
        engine.recorded,
        context=engine.sizes.context,
        prompts=_SHARES * engine.sizes.long_prompt,
        answers=_SHARES * engine.sizes.generation,
    )
    if not requests:
        raise WorkloadFailed(f"no request of {engine.model} is recorded")
    count = 1 + max(request.conversation for request in requests)
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(engine.client()) for _ in range(count)]
        words = await send.tokenize(clients[0], " ".join(WORDS))
        replay = _Replay(requests, clients, words, rng, names_slots=engine.names_slots)
        began_s = time.perf_counter()
        replies = await replay.run()
        took_s = time.perf_counter() - began_s
    values = _reply_values("yours", replies) | {"yours.duration": took_s}
    return without_none(values), sum(reply.tokens for reply in replies)


@define(eq=False, slots=False)
class _Replay:
    """One run of a replay; texts are chosen before the first request is sent."""

    _requests: Sequence[ReplayedRequest]
    _clients: Sequence[EngineClient]
    _words: Sequence[int]
    _rng: Random
    _names_slots: bool
    # By conversation, its last prompt with the answer.
    _histories: dict[int, list[int]] = field(factory=dict, init=False)
    # By slot, the conversation that used it last.
    _holds: dict[int, int] = field(factory=dict, init=False)
    _unnamed: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        most = max(request.prompt for request in self._requests)
        self._common = self._rng.choices(self._words, k=most)
        self._own = [self._rng.choices(self._words, k=request.prompt) for request in self._requests]
        self._answered = [asyncio.Event() for _ in self._requests]

    async def run(self) -> list[Reply]:
        return await send.run_together([self._send(place) for place in range(len(self._requests))])

    async def _send(self, place: int) -> Reply:
        request = self._requests[place]
        for before in request.after:
            await self._answered[before].wait()
        await asyncio.sleep(request.pause_s)
        prompt = self._prompt(place)
        client = self._clients[request.conversation]
        slot = self._slot(request.conversation)
        self._unnamed += slot is None
        try:
            reply = await send.complete_tokens(client, prompt, request.answer, slot)
        finally:
            self._unnamed -= slot is None
        if reply.id_slot is not None:
            self._holds[reply.id_slot] = request.conversation
        self._histories[request.conversation] = [*prompt, *reply.token_ids]
        self._answered[place].set()
        return reply

    def _slot(self, conversation: int) -> int | None:
        """Return the slot that holds a conversation, unless the engine may just have reused it."""
        if not self._names_slots or self._unnamed:
            return None
        held = [slot for slot, number in self._holds.items() if number == conversation]
        return held[0] if held else None

    def _prompt(self, place: int) -> list[int]:
        request = self._requests[place]
        shared = self._histories.get(request.conversation, self._common)[: request.shared]
        return [*shared, *self._own[place][: request.prompt - len(shared)]]


_RUNS: Final[Mapping[str, Callable[[MeasuredEngine, Random], Awaitable[Outcome]]]] = {
    "chat": _run_chat,
    "long-prompt": lambda engine, rng: _complete(
        engine, rng, "long-prompt", engine.sizes.long_prompt, 1
    ),
    "generation": lambda engine, rng: _complete(
        engine, rng, "generation", engine.sizes.question, engine.sizes.generation
    ),
    "concurrent": _run_concurrent,
    "batch": _run_batch,
    "embedding": _run_embedding,
    "yours": _run_yours,
}
WORKLOADS: Final[Mapping[str, Workload]] = MappingProxyType(
    {
        name: Workload(
            name,
            row["description"],
            tuple(Figure(f"{name}.{what}", title, unit) for what, title, unit in row["figures"]),
            _RUNS[name],
            for_embedding=name == "embedding",
            unavailable=reason_unavailable if name == "yours" else lambda _, __: None,
        )
        for name, row in table_beside(__file__).items()
    }
)


def choose(
    names: Sequence[str], model: str, plan: Plan, recorded: Sequence[RecordedRequest]
) -> tuple[Workload, ...]:
    """Return the named workloads, or all that suit the model; raises SettingsInvalid."""
    wanted = tuple(map(_workload, dict.fromkeys(names))) or tuple(WORKLOADS.values())
    reasons = {
        workload.name: reason
        for workload in wanted
        if (reason := _reason_unsuited(workload, model, plan, recorded))
    }
    if names and reasons:
        name, reason = next(iter(reasons.items()))
        raise SettingsInvalid(f"the workload {name} cannot be measured: {reason}")
    if found := tuple(workload for workload in wanted if workload.name not in reasons):
        return found
    every = "; ".join(dict.fromkeys(reasons.values()))
    raise SettingsInvalid(f"no workload suits {model}: {every}")


def _workload(name: str) -> Workload:
    if name in WORKLOADS:
        return WORKLOADS[name]
    near = nearest(name, WORKLOADS)
    raise SettingsInvalid(
        f"no workload is named {name!r}" + (f"; did you mean {near}?" if near else ""),
        hint=f"workloads: {', '.join(WORKLOADS)}",
    )


def _reason_unsuited(
    workload: Workload, model: str, plan: Plan, recorded: Sequence[RecordedRequest]
) -> str | None:
    embedding = plan.embedding
    if workload.for_embedding and embedding is None:
        return f"{model} makes no embeddings"
    if embedding and workload.for_embedding and embedding.pooling == "rank":
        return f"{model} ranks texts"
    if embedding and not workload.for_embedding and embedding.is_only:
        return f"{model} generates no text"
    return workload.unavailable(model, recorded)
