"""Compare how long sessions of agents take, with slots held for their next turns and without.

Eight agents of four API keys have sessions of 12 to 40 turns: each answer calls a tool that takes
0.2 to 20 s, and its result makes the history longer, up to some 6 000 tokens. Every fourth agent
has two sub-agents with the same beginning once in a while. Clients of a fifth key ask single
questions meanwhile. All share four slots of two engines with one thread each.

The model says what a script has it say (`scripts.client_programs.scripted_model`), and computes as
much for it as one of 60 million parameters. Without `--caches`, the engines have no cache beside
their slots, as where conversations are too large for one: that is what a hold spares. Computed
tokens depend little on the machine's load; times do, so they are compared between interleaved runs.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import aiohttp
from support.agents import TOOLS_S, tool_s

from scripts.bench.conversations import TIMEOUT_S, WORDS
from scripts.bench.deployment import KEYS, NO_FILES, OURS, SMG, Deployment, reaching
from scripts.bench.result import Figure, Result
from scripts.client_programs import scripted_model
from supervisor.models import pinned
from supervisor.system.paths import directories

_AGENTS: Final = 8
_SINGLE_CLIENTS: Final = 2
_SINGLE_PAUSE_S: Final = 4.0
_SYSTEM_WORDS: Final = 400
_ANSWER_TOKENS: Final = 40
_FLAGS: Final = {**OURS, "parallel": 2, "batch-size": 256, "ubatch-size": 256}
_CALL, _ANSWER = "<|agent calls|>", "<|agent answers|>"
# It calls the tool that the latest message names, if it names any.
_TEMPLATE: Final = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}"
    "{{- tool | tojson ~ '\\n' }}{%- endfor %}"
    '{{- \'<tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call>\' }}'
    "{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content %}{{- message.content }}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}"
    "{%- if call.function %}{%- set call = call.function %}{%- endif %}"
    '{{- \'<tool_call>\\n{"name": "\' }}{{- call.name }}{{- \'", "arguments": \' }}'
    "{{- call.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    f"{{%- if tools %}}{{{{- '{_CALL}' ~ messages[-1].content.split(' ')[0] ~ '|>' }}}}"
    f"{{%- else %}}{{{{- '{_ANSWER}' }}}}{{%- endif %}}{{%- endif %}}"
)
_NOT_HELD = Deployment("slots not held", "affinity", _FLAGS, share_caches="all")
_HELD = replace(_NOT_HELD, name="slots held", proxy={"slot_hold_max_s": 20})
_LEAST_BUSY = replace(_NOT_HELD, name="least busy", policy="least-busy")


@dataclass
class _Outcome:
    sessions_s: list[float] = field(default_factory=list)
    singles_s: list[float] = field(default_factory=list)
    computed: int = 0
    new: int = 0  # Tokens of prompts that were not in the same conversation before.


def main() -> int:
    """Run all, print the figures, and return 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short sessions, ours alone, once")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=101)
    parser.add_argument("--caches", action="store_true", help="host cache and slot files")
    parser.add_argument("--tiny", action="store_true", help="a tenth of the work for each token")
    parser.add_argument("--smg", metavar="PATH", help="program of PyPI's smg")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    deployments = [_NOT_HELD, _HELD]
    if not options.quick:
        deployments = [_LEAST_BUSY, *deployments]
    if not options.caches:
        deployments = [
            replace(deployment, supervisor=NO_FILES).with_flags({"cache-ram": 0})
            for deployment in deployments
        ]
    if options.smg:
        rival = replace(SMG, program=options.smg).with_flags({"parallel": 2})
        deployments.insert(0, rival)
    turns = (4, 8) if options.quick else (12, 40)
    outcomes: dict[str, list[_Outcome]] = {deployment.name: [] for deployment in deployments}
    with tempfile.TemporaryDirectory(prefix="corral-") as directory:
        model = _write_model(Path(directory, "agents.gguf"), is_tiny=options.tiny)
        for number in range(1 if options.quick else options.rounds):
            for deployment in deployments if number % 2 == 0 else reversed(deployments):
                with reaching(deployment, model) as url:
                    sessions = _Sessions(url, options.seed + number, turns)
                    outcome = asyncio.run(sessions.run())
                outcomes[deployment.name].append(outcome)
                print(f"{deployment.name}: {_line(outcome)}", flush=True)
    found = _result(outcomes)
    found.write(options.json)
    for goal in found.missed:
        print(f"missed: {goal}")
    return 1 if found.missed else 0


def _write_model(path: Path, *, is_tiny: bool) -> Path:
    calls = [
        scripted_model.Line(
            f"{_CALL}{name}|>",
            f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>',
            words=_ANSWER_TOKENS,
        )
        for name in TOOLS_S
    ]
    answer = scripted_model.Line(_ANSWER, "That is all.", words=_ANSWER_TOKENS)
    vocabulary_of = pinned.find_pin("smollm2").path(directories().models)
    layers, embd = (4, 256) if is_tiny else (16, 384)
    return scripted_model.write(
        path, vocabulary_of, [*calls, answer], _TEMPLATE, ctx=16384, layers=layers, embd=embd
    )


class _Sessions:
    """All sessions of one run; the same ones for a seed."""

    def __init__(self, url: str, seed: int, turns: tuple[int, int]) -> None:
        self._url = url
        self._seed = seed
        self._turns = turns
        self._outcome = _Outcome()
        self._system = _words(random.Random(seed), _SYSTEM_WORDS)  # noqa: S311 (a workload)

    async def run(self) -> _Outcome:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with (
            aiohttp.ClientSession(self._url, timeout=timeout) as self._http,
            asyncio.TaskGroup() as beside,
        ):
            singles = [beside.create_task(self._singles(at)) for at in range(_SINGLE_CLIENTS)]
            async with asyncio.TaskGroup() as group:
                for number in range(_AGENTS):
                    group.create_task(self._session(number))
            for task in singles:
                task.cancel()
        return self._outcome

    async def _session(self, number: int) -> None:
        began_s = time.monotonic()
        await self._agent(number, f"agent {number}", has_sub_agents=number % 4 == 0)
        self._outcome.sessions_s.append(time.monotonic() - began_s)

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
            began_s = time.monotonic()
            await self._ask(KEYS[-1], [question], 0, [])
            self._outcome.singles_s.append(time.monotonic() - began_s)

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


_FIGURES: Final[Mapping[tuple[str, str], Callable[[_Outcome], float]]] = {
    ("session, mean", "s"): lambda outcome: statistics.mean(outcome.sessions_s),
    ("session, longest", "s"): lambda outcome: max(outcome.sessions_s),
    ("single turn, mean", "s"): lambda outcome: statistics.mean(outcome.singles_s),
    ("single turn, 95th percentile", "s"): lambda outcome: statistics.quantiles(
        outcome.singles_s, n=20
    )[-1],
    ("prompt tokens computed", "tokens"): lambda outcome: outcome.computed,
    ("computed, as a multiple of the new ones", ""): lambda outcome: outcome.computed / outcome.new,
}


def _line(outcome: _Outcome) -> str:
    figures = (f"{name} {value(outcome):.2f} {unit}" for (name, unit), value in _FIGURES.items())
    return "; ".join(figures)


def _result(outcomes: Mapping[str, Sequence[_Outcome]]) -> Result:
    held, without = outcomes[_HELD.name], outcomes[_NOT_HELD.name]

    def ratio(value: Callable[[_Outcome], float]) -> float:
        pairs = zip(held, without, strict=True)
        return statistics.median(value(run) / value(other) for run, other in pairs)

    session = ratio(_FIGURES["session, mean", "s"])
    single = ratio(_FIGURES["single turn, mean", "s"])
    repeated = statistics.median(run.computed / run.new for run in held)
    return Result(
        [
            Figure(
                f"agents: {name}",
                unit,
                {variant: [value(run) for run in runs] for variant, runs in outcomes.items()},
                base=_NOT_HELD.name if unit else "",
            )
            for (name, unit), value in _FIGURES.items()
        ],
        {
            f"agents: sessions take at most 0.67 of the time without ({session:.2f})": (
                session <= 0.67
            ),
            f"agents: single turns take at most 2 % longer ({single:.2f})": single <= 1.02,
            f"agents: at most 1.1 times the new tokens ({repeated:.2f})": repeated <= 1.1,
        },
    )


if __name__ == "__main__":
    sys.exit(main())
