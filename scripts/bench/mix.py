"""Requests of many kinds for several models, made from a seed, and clients that ask them."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from scripts.bench.talks import WORDS

PATIENCE_S = 300
TOKENS = (8, 16, 24, 32)
PROMPT_WORDS = (10, 80)


@dataclass(frozen=True)
class Question:
    """One request.

    Attributes:
        model: Who is asked.
        is_chat: Whether it is a chat completion, else a text completion.
        is_stream: Whether the answer is asked as a stream.
        tokens: Length of the answer at most.
        words: The prompt.
    """

    model: str
    is_chat: bool
    is_stream: bool
    tokens: int
    words: str

    @property
    def path(self) -> str:
        """Return where it is asked."""
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    @property
    def body(self) -> Mapping[str, object]:
        """Return what is asked."""
        said = {"messages": [{"role": "user", "content": self.words}]}
        return {
            **(said if self.is_chat else {"prompt": self.words}),
            "model": self.model,
            "stream": self.is_stream,
            "max_tokens": self.tokens,
            "temperature": 0,
        }


@dataclass(frozen=True)
class Answer:
    """What came of a request.

    Attributes:
        question: What was asked.
        took_s: From asking to the end.
        request: Its name in the daemon's events; empty where the daemon gave none.
        flaw: What was wrong with it, or None.
        is_cut: Whether it began and did not come to its end.
    """

    question: Question
    took_s: float
    request: str = ""
    flaw: str | None = None
    is_cut: bool = False


def make_questions(
    models: Sequence[str], seed: int, *, clients: int, count: int
) -> list[list[Question]]:
    """Return what each client asks, in order; the same for the same seed."""
    chance = random.Random(seed)  # noqa: S311 (a workload hides nothing)
    asked = [_question(chance, models) for _ in range(count)]
    return [asked[number::clients] for number in range(clients)]


def _question(chance: random.Random, models: Sequence[str]) -> Question:
    return Question(
        model=chance.choice(models),
        is_chat=chance.random() < 0.5,
        is_stream=chance.random() < 0.5,
        tokens=chance.choice(TOKENS),
        words=" ".join(chance.choices(WORDS, k=chance.randint(*PROMPT_WORDS))),
    )


async def ask_all(url: str, lists: Sequence[Sequence[Question]]) -> list[list[Answer]]:
    """Have each client ask its questions one after another; return the answers of each."""
    async with session(url) as http, asyncio.TaskGroup() as group:
        clients = [group.create_task(_ask_each(http, questions)) for questions in lists]
    return [client.result() for client in clients]


def session(url: str) -> aiohttp.ClientSession:
    """Return what clients ask with."""
    return aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=PATIENCE_S))


async def _ask_each(http: aiohttp.ClientSession, questions: Sequence[Question]) -> list[Answer]:
    return [await ask(http, question) for question in questions]


async def ask(http: aiohttp.ClientSession, question: Question) -> Answer:
    """Ask once, and look whether the answer is whole."""
    began_at_s, has_begun, request = time.monotonic(), False, ""
    try:
        async with http.post(question.path, json=question.body) as response:
            has_begun = response.status == 200
            request = response.headers["X-Request-Id"]
            text = await response.text()
        flaw = _flaw(question, text) if has_begun else f"{response.status}: {text[:300]}"
    except (aiohttp.ClientError, TimeoutError) as error:
        flaw = repr(error)
    took_s = time.monotonic() - began_at_s
    return Answer(question, took_s, request, flaw, is_cut=has_begun and flaw is not None)


def _flaw(question: Question, text: str) -> str | None:
    """Return what an answer lacks to be whole."""
    if not question.is_stream:
        return None if _is_finished([json.loads(text)]) else f"without an end: {text[:300]}"
    said = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if said[-1:] != ["[DONE]"]:
        return f"ends with {said[-1:]}"
    chunks = [json.loads(one) for one in said[:-1]]
    return None if _is_finished(chunks) else "[DONE], but no finish_reason"


def _is_finished(chunks: Sequence[Mapping[str, Any]]) -> bool:
    return any(one.get("finish_reason") for chunk in chunks for one in chunk.get("choices", ()))
