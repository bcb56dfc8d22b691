"""Synthetic conversations from a seed, and concurrent clients that run them."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

# Common words of one or two tokens; only repetition matters, not meaning.
WORDS = re.findall(
    r"\w+",
    """
    time year people way day man thing woman life child world school state family student
    group country problem hand part place case week company system program question work
    government number night point home water room mother area money story fact month lot right
    study book eye job word business issue side kind head house service friend father power
    hour game line end member law car city community name president team minute idea body
    information back parent face others level office door health person art war history party
    result change morning reason research girl guy moment air teacher force education foot boy
    age policy music river garden winter letter paper table window engine bridge island
    mountain
    """,
)
TIMEOUT_S = 300
ATTEMPTS_MAX = 5


@dataclass(frozen=True)
class Workload:
    """How many conversations, how long, and how many at once.

    Attributes:
        applications: Groups of conversations that share a system prompt; 0: nothing is shared.
        system_words: Length of a system prompt.
        turns: Questions per conversation.
        turn_words: Length of a question.
        tokens: Tokens generated per answer.
        clients: Conversations in progress at once.
        think_s: Pause between an answer and the next question.
    """

    name: str
    applications: int = 2
    system_words: int = 260
    conversations: int = 10
    turns: int = 5
    turn_words: int = 40
    tokens: int = 12
    clients: int = 4
    think_s: float = 0.0


@dataclass
class Conversation:
    """One conversation: its messages so far, and the questions left."""

    number: int
    messages: list[dict[str, str]]
    questions: list[str]
    ready_at_s: float = 0.0


@dataclass(frozen=True)
class TurnResult:
    """One answer.

    Attributes:
        prefilled: Prompt tokens that the engine computed.
        cached: Prompt tokens from its cache.
        decoded: Generated tokens.
        prefill_s: For which the engine computed the prompt.
        first_token_s: From the request to the first text.
        duration_s: From the request to the end.
        instance: From `X-Corral-Instance`; empty without that header.
    """

    prefilled: int
    cached: int
    decoded: int
    prefill_s: float
    first_token_s: float
    duration_s: float
    instance: str


@dataclass(frozen=True)
class Turn:
    """A question that was answered.

    Attributes:
        began_at_s: When it was sent; monotonic.
        model: As requested.
        messages: Up to the question.
        text: The answer.
    """

    began_at_s: float
    model: str
    messages: Sequence[Mapping[str, str]]
    text: str
    result: TurnResult


@dataclass
class WorkloadResult:
    """The result of a workload.

    Attributes:
        turns: In the order in which they ended.
        failures: Errors of attempts that failed and were retried.
        wall_s: From the first question to the last answer.
        decoded: Generated tokens by instance.
        new: Prompt tokens that no earlier turn had (`scripts.bench.new_tokens`).
        distinct: The same, if each prefix is computed once.
        computed: Prompt tokens that a proxy counted, which may have computed a part of a prompt
            before its request; None: those of the answers.
    """

    turns: list[Turn] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    decoded: dict[str, float] = field(default_factory=dict)
    new: int = 0
    distinct: int = 0
    computed: int | None = None

    @property
    def answers(self) -> list[TurnResult]:
        return [turn.result for turn in self.turns]

    @property
    def prefilled(self) -> int:
        if self.computed is not None:
            return self.computed
        return sum(answer.prefilled for answer in self.answers)

    @property
    def cached_share(self) -> float:
        """The share of prompt tokens from a cache, 0 to 1."""
        tokens = sum(answer.prefilled + answer.cached for answer in self.answers)
        return 1 - self.prefilled / max(1, tokens)


def make_conversations(workload: Workload, seed: int) -> list[Conversation]:
    """Return the conversations of a workload; deterministic for a seed."""
    rng = random.Random(seed)  # noqa: S311 (a workload, no secret)
    systems = [_words(rng, workload.system_words) for _ in range(workload.applications)]
    return [
        _conversation(rng, workload, number, systems) for number in range(workload.conversations)
    ]


def _conversation(
    rng: random.Random, workload: Workload, number: int, systems: Sequence[str]
) -> Conversation:
    own = _words(rng, workload.system_words)
    system = systems[number % len(systems)] if systems else own
    questions = [_words(rng, workload.turn_words) for _ in range(workload.turns)]
    return Conversation(number, [{"role": "system", "content": system}], questions)


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))


class Clients:
    """Clients that each run the next turn of a random conversation that is ready.

    Args:
        url: Returns the API's base URL for the next request.
        route: Returns the model for a conversation.
        seed: Determines the conversations and their order.
        on_answer: Called after each answer with the number of answers so far.
        keys: API keys, which conversations have in turn; none: they need none.
    """

    def __init__(
        self,
        url: Callable[[], str],
        route: Callable[[Conversation], str],
        workload: Workload,
        seed: int,
        on_answer: Callable[[int], None] = lambda _: None,
        keys: Sequence[str] = (),
    ) -> None:
        self._keys = keys
        self._url = url
        self._route = route
        self._workload = workload
        self._conversations = make_conversations(workload, seed)
        self._rng = random.Random(seed + 1)  # noqa: S311 (as above)
        self._on_answer = on_answer
        self._result = WorkloadResult()

    async def run(self) -> WorkloadResult:
        """Run all conversations to their ends."""
        began_at_s = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with (
            aiohttp.ClientSession(timeout=timeout) as http,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(self._workload.clients):
                group.create_task(self._run_client(http))
        self._result.wall_s = time.monotonic() - began_at_s
        return self._result

    async def _run_client(self, http: aiohttp.ClientSession) -> None:
        while conversation := await self._pick():
            await self._turn(http, conversation)
            conversation.ready_at_s = time.monotonic() + self._workload.think_s
            if conversation.questions:
                self._conversations.append(conversation)

    async def _pick(self) -> Conversation | None:
        while self._conversations:
            now_s = time.monotonic()
            ready = [
                conversation
                for conversation in self._conversations
                if conversation.ready_at_s <= now_s
            ]
            if ready:
                conversation = self._rng.choice(ready)
                self._conversations.remove(conversation)
                return conversation
            await asyncio.sleep(
                min(conversation.ready_at_s for conversation in self._conversations) - now_s
            )
        return None

    async def _turn(self, http: aiohttp.ClientSession, conversation: Conversation) -> None:
        conversation.messages.append({"role": "user", "content": conversation.questions.pop(0)})
        model = self._route(conversation)
        body = {
            "model": model,
            "messages": conversation.messages,
            "stream": True,
            "max_tokens": self._workload.tokens,
            "temperature": 0,
        }
        headers = {}
        if self._keys:
            key = self._keys[conversation.number % len(self._keys)]
            headers["Authorization"] = f"Bearer {key}"
        for _ in range(ATTEMPTS_MAX):
            began_at_s = time.monotonic()
            try:
                result, text = await chat(http, body, self._url(), headers)
                break
            except (aiohttp.ClientError, RuntimeError) as error:
                self._result.failures.append(repr(error))
        else:
            raise RuntimeError(f"no answer in {ATTEMPTS_MAX} attempts: {self._result.failures[-1]}")
        asked = tuple(conversation.messages)
        self._result.turns.append(Turn(began_at_s, model, asked, text, result))
        conversation.messages.append({"role": "assistant", "content": text})
        self._on_answer(len(self._result.turns))


async def chat(
    http: aiohttp.ClientSession,
    body: Mapping[str, Any],
    url: str = "",
    headers: Mapping[str, str] | None = None,
) -> tuple[TurnResult, str]:
    """Send one streaming chat request; return its figures and text.

    `url` is the base URL, where the session has none.

    Raises:
        RuntimeError: The answer is an error, or ended early.
        ClientError: The connection broke.
    """
    began_at_s = time.monotonic()
    first_at_s, text, timings = 0.0, "", None
    async with http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {await response.text()}")
        instance = response.headers.get("X-Corral-Instance", "")
        async for chunk in events(response):
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            delta = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            first_at_s = first_at_s or (time.monotonic() if delta else 0.0)
            text += delta
            timings = chunk.get("timings", timings)
    if timings is None:
        raise RuntimeError("the answer ended without its timings")
    ended_at_s = time.monotonic()
    first_token_s = (first_at_s or ended_at_s) - began_at_s
    duration_s = ended_at_s - began_at_s
    tokens = (timings["prompt_n"], timings["cache_n"], timings["predicted_n"])
    prefill_s = timings["prompt_ms"] / 1000
    return TurnResult(*tokens, prefill_s, first_token_s, duration_s, instance), text


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON of each event except `[DONE]`."""
    async for line in response.content:
        data = line.removeprefix(b"data: ").strip()
        if line.startswith(b"data: ") and data != b"[DONE]":
            yield json.loads(data)
