"""Conversations made up from a seed, and clients that hold them."""

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

# Everyday words of one or two tokens; what they say does not matter, only what repeats does.
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
PATIENCE_S = 300
TRIES_MAX = 5


@dataclass(frozen=True)
class Workload:
    """What clients do.

    Attributes:
        name: As people call it.
        applications: Groups of conversations that begin with the same system prompt; 0 for none
            that share anything.
        system_words: Length of a system prompt.
        conversations: How many in all.
        turns: Questions in each.
        turn_words: Length of a question.
        tokens: Tokens generated in answer.
        clients: Conversations that go on at once.
        think_s: Pause of a conversation between an answer and the next question.
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
class Talk:
    """One conversation: what was said so far, and what is left to ask."""

    number: int
    messages: list[dict[str, str]]
    questions: list[str]
    rested_at_s: float = 0.0


@dataclass(frozen=True)
class Answered:
    """One answer.

    Attributes:
        prefilled: Prompt tokens that the engine computed.
        cached: Prompt tokens that it had.
        first_token_s: From asking to the first text.
        took_s: From asking to the end.
        instance: Who answered; empty where the proxy does not say.
    """

    prefilled: int
    cached: int
    first_token_s: float
    took_s: float
    instance: str


@dataclass
class Tally:
    """What came of a workload.

    Attributes:
        answers: In the order they ended.
        failures: What was wrong with tries that failed and were repeated.
        wall_s: From the first question to the last answer.
        decoded: Tokens that each engine generated.
    """

    answers: list[Answered] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    decoded: dict[str, float] = field(default_factory=dict)

    @property
    def prefilled(self) -> int:
        """Return the prompt tokens computed in all."""
        return sum(answer.prefilled for answer in self.answers)

    @property
    def cached_share(self) -> float:
        """Return the share of prompt tokens that were not computed."""
        cached = sum(answer.cached for answer in self.answers)
        return cached / max(1, cached + self.prefilled)


def make_talks(workload: Workload, seed: int) -> list[Talk]:
    """Return the conversations of a workload; the same for the same seed."""
    chance = random.Random(seed)  # noqa: S311 (a workload hides nothing)
    systems = [_words(chance, workload.system_words) for _ in range(workload.applications)]
    return [_talk(chance, workload, number, systems) for number in range(workload.conversations)]


def _talk(chance: random.Random, workload: Workload, number: int, systems: Sequence[str]) -> Talk:
    own = _words(chance, workload.system_words)
    system = systems[number % len(systems)] if systems else own
    questions = [_words(chance, workload.turn_words) for _ in range(workload.turns)]
    return Talk(number, [{"role": "system", "content": system}], questions)


def _words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices(WORDS, k=count))


class Clients:
    """Clients that each ask the next question of some conversation, wait for the answer, and go on.

    Args:
        url: Where the API is.
        route: The model that a conversation is held with.
        workload: What is asked.
        seed: Decides the conversations and their order.
        on_answer: Called after each answer with how many there were.
    """

    def __init__(
        self,
        url: str,
        route: Callable[[Talk], str],
        workload: Workload,
        seed: int,
        on_answer: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._url = url
        self._route = route
        self._workload = workload
        self._talks = make_talks(workload, seed)
        self._chance = random.Random(seed + 1)  # noqa: S311 (as above)
        self._on_answer = on_answer
        self._tally = Tally()

    async def run(self) -> Tally:
        """Hold all conversations to their ends."""
        began_at_s = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
        async with (
            aiohttp.ClientSession(self._url, timeout=timeout) as http,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(self._workload.clients):
                group.create_task(self._go_on(http))
        self._tally.wall_s = time.monotonic() - began_at_s
        return self._tally

    async def _go_on(self, http: aiohttp.ClientSession) -> None:
        while talk := await self._pick():
            await self._turn(http, talk)
            talk.rested_at_s = time.monotonic() + self._workload.think_s
            if talk.questions:
                self._talks.append(talk)

    async def _pick(self) -> Talk | None:
        while self._talks:
            now_s = time.monotonic()
            rested = [talk for talk in self._talks if talk.rested_at_s <= now_s]
            if rested:
                talk = self._chance.choice(rested)
                self._talks.remove(talk)
                return talk
            await asyncio.sleep(min(talk.rested_at_s for talk in self._talks) - now_s)
        return None

    async def _turn(self, http: aiohttp.ClientSession, talk: Talk) -> None:
        talk.messages.append({"role": "user", "content": talk.questions.pop(0)})
        body = {
            "model": self._route(talk),
            "messages": talk.messages,
            "stream": True,
            "max_tokens": self._workload.tokens,
            "temperature": 0,
        }
        for _ in range(TRIES_MAX):
            try:
                answered, text = await ask(http, body)
                break
            except (aiohttp.ClientError, RuntimeError) as error:
                self._tally.failures.append(repr(error))
        else:
            raise RuntimeError(f"no answer in {TRIES_MAX} tries: {self._tally.failures[-1]}")
        talk.messages.append({"role": "assistant", "content": text})
        self._tally.answers.append(answered)
        self._on_answer(len(self._tally.answers))


async def ask(http: aiohttp.ClientSession, body: Mapping[str, Any]) -> tuple[Answered, str]:
    """Ask once, streamed; return the figures and the text.

    Raises:
        RuntimeError: The answer is an error, or ended early.
        ClientError: The connection broke.
    """
    began_at_s = time.monotonic()
    first_at_s, text, timings = 0.0, "", None
    async with http.post("/v1/chat/completions", json=body) as response:
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {await response.text()}")
        instance = response.headers.get("X-Corral-Instance", "")
        async for chunk in events(response):
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["message"])
            said = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            first_at_s = first_at_s or (time.monotonic() if said else 0.0)
            text += said
            timings = chunk.get("timings", timings)
    if timings is None:
        raise RuntimeError("the answer ended without its timings")
    ended_at_s = time.monotonic()
    first_token_s = (first_at_s or ended_at_s) - began_at_s
    took_s = ended_at_s - began_at_s
    figures = (timings["prompt_n"], timings["cache_n"], first_token_s, took_s, instance)
    return Answered(*figures), text


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Yield the data of each event but the last, which says that it is done."""
    async for line in response.content:
        data = line.removeprefix(b"data: ").strip()
        if line.startswith(b"data: ") and data != b"[DONE]":
            yield json.loads(data)
