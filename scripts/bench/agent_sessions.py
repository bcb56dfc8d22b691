"""Sessions of agents that call tools, and single questions beside them, sent to a chat API.

Eight agents of four API keys have sessions of 12 to 40 turns: each answer calls a tool that takes
0.2 to 20 s, and its result makes the history longer, up to some 6 000 tokens. Every fourth agent
has two sub-agents with the same beginning once in a while. Clients of a fifth key ask single
questions meanwhile.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from scripts.bench.conversations import WORDS
from scripts.bench.deployment import KEYS

AGENTS: Final = 8
_SINGLE_CLIENTS: Final = 2
_SINGLE_PAUSE_S: Final = 4.0
_SYSTEM_WORDS: Final = 400
# By name, the usual time of a tool.
TOOLS_S: Final = {"read": 0.4, "search": 1.5, "test": 6.0}


def tool_s(rng: random.Random, tool: str) -> float:
    """Return how long a call of a tool takes: 0.2 to 20 s."""
    return min(20.0, max(0.2, rng.lognormvariate(0, 0.5) * TOOLS_S[tool]))


@dataclass
class Outcome:
    """The results of the sessions.

    Attributes:
        computed: Prompt tokens.
        new: Tokens of prompts that were not in the same conversation before.
    """

    sessions_s: list[float] = field(default_factory=list)
    singles_s: list[float] = field(default_factory=list)
    computed: int = 0
    new: int = 0


class Sessions:
    """All sessions of one run; the same ones for a seed."""

    def __init__(
        self, http: aiohttp.ClientSession, seed: int, turns: tuple[int, int], agents: int = AGENTS
    ) -> None:
        self._http = http
        self._seed = seed
        self._turns = turns
        self._agents = agents
        self._outcome = Outcome()
        self._system = _words(random.Random(seed), _SYSTEM_WORDS)  # noqa: S311 (a workload)

    async def run(self) -> Outcome:
        async with asyncio.TaskGroup() as beside:
            singles = [beside.create_task(self._singles(at)) for at in range(_SINGLE_CLIENTS)]
            async with asyncio.TaskGroup() as group:
                for number in range(self._agents):
                    group.create_task(self._session(number))
            for task in singles:
                task.cancel()
        return self._outcome

    async def _session(self, number: int) -> None:
        clock = asyncio.get_running_loop().time
        began_s = clock()
        await self._agent(number, f"agent {number}", has_sub_agents=number % 4 == 0)
        self._outcome.sessions_s.append(clock() - began_s)

    async def _agent(self, number: int, name: str, *, has_sub_agents: bool) -> None:
        rng = random.Random(f"{self._seed} {name}")  # noqa: S311 (as above)
        least, most = self._turns
        turns = rng.randint(least, most) if has_sub_agents or name.startswith("agent") else 3
        tool = rng.choice(list(TOOLS_S))
        task = f"{tool} {_words(rng, rng.randint(200, 500))}"
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": self._system},
            {"role": "user", "content": task},
        ]
        known = 0
        for turn in range(turns):
            if has_sub_agents and turn == turns // 2:
                async with asyncio.TaskGroup() as group:
                    for at in range(2):
                        other = f"sub-agent {number} {at}"
                        group.create_task(self._agent(number, other, has_sub_agents=False))
            key = KEYS[number % (len(KEYS) - 1)]
            message, known = await self._ask(key, messages, known, [*TOOLS_S])
            await asyncio.sleep(tool_s(rng, tool))
            tool = rng.choice(list(TOOLS_S))
            text = f"{tool} {_words(rng, rng.randint(30, 150))}"
            calls = message.get("tool_calls") or []
            assert calls, message  # noqa: S101 (or it is no agent)
            results = [
                {"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls
            ]
            messages += [message, *results]

    async def _singles(self, number: int) -> None:
        rng = random.Random(f"{self._seed} single {number}")  # noqa: S311 (as above)
        while True:
            await asyncio.sleep(rng.expovariate(1 / _SINGLE_PAUSE_S))
            question = {"role": "user", "content": _words(rng, rng.randint(40, 200))}
            began_s = asyncio.get_running_loop().time()
            await self._ask(KEYS[-1], [question], 0, [])
            self._outcome.singles_s.append(asyncio.get_running_loop().time() - began_s)

    async def _ask(
        self, key: str, messages: Sequence[Mapping[str, Any]], known: int, tools: Sequence[str]
    ) -> tuple[dict[str, Any], int]:
        """Return the answer, and the tokens of the conversation with it; `known` are before."""
        body: dict[str, Any] = {"model": "chat", "messages": messages, "temperature": 0}
        schema = {"type": "object", "properties": {}}
        functions = [{"name": tool, "description": "", "parameters": schema} for tool in tools]
        if tools:
            body["tools"] = [{"type": "function", "function": function} for function in functions]
        headers = {"Authorization": f"Bearer {key}"}
        async with self._http.post("/v1/chat/completions", json=body, headers=headers) as response:
            answer = await response.json()
            if response.status != 200:
                raise RuntimeError(f"{response.status}: {answer}")
        usage = answer["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        self._outcome.computed += usage["prompt_tokens"] - cached
        self._outcome.new += max(0, usage["prompt_tokens"] - known)
        return answer["choices"][0]["message"], usage["total_tokens"]


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS, k=count))
