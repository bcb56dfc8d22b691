"""Compare how long sessions of agents take, with slots held for their next turns and without.

The sessions are those of `agent_sessions`. They share four slots of two engines with one thread
each. Without `--caches`, the engines have no cache beside their slots, as if conversations were too
large for one: a hold saves that loss.

The model says the text of a script (`scripts.client_programs.scripted_model`), and computes as
much for it as one of 60 million parameters. Computed tokens depend little on the machine's load;
times do, so they are compared between interleaved runs. With `--simulated`, the whole proxy runs in
virtual time, before engines that only wait (`tests/support/agents.py`): that depends on no machine.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import aiohttp
from support.agents import AgentsCase, simulate

from scripts.bench.agent_sessions import TOOLS_S, Outcome, Sessions
from scripts.bench.conversations import TIMEOUT_S
from scripts.bench.deployment import NO_FILES, OURS, SMG, Deployment, reaching
from scripts.bench.result import Figure, Result
from scripts.client_programs import scripted_model
from supervisor.models import pinned
from supervisor.system.paths import directories

_ANSWER_TOKENS: Final = 40
# Some histories have more than 8 192 tokens.
_FLAGS: Final = {**OURS, "parallel": 2, "ctx-size": 32768, "batch-size": 256, "ubatch-size": 256}
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
_HELD = Deployment("slots held", "affinity", _FLAGS, share_caches="all")
_NOT_HELD = replace(_HELD, name="slots not held", proxy={"slot_hold_max_s": 0})
_LEAST_BUSY = replace(_NOT_HELD, name="least busy", policy="least-busy")
_HOST_CACHE_BYTES: Final = 8e9


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
    parser.add_argument(
        "--simulated",
        nargs=2,
        type=float,
        metavar=("PREFILL", "DECODE"),
        help="in virtual time, on engines of so many tokens per second",
    )
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
        rival = replace(SMG, program=options.smg)
        rival = rival.with_flags({"parallel": 2, "ctx-size": 32768})
        deployments.insert(0, rival if options.caches else rival.with_flags({"cache-ram": 0}))
    turns = (4, 8) if options.quick else (12, 40)
    with tempfile.TemporaryDirectory(prefix="corral-") as directory:
        if options.simulated:
            prefill_tps, decode_tps = options.simulated
            run = partial(_simulate, prefill_tps, decode_tps, turns, has_caches=options.caches)
        else:
            model = _write_model(Path(directory, "agents.gguf"), is_tiny=options.tiny)
            run = partial(_run, model, turns)
        outcomes = _outcomes(deployments, run, options.seed, 1 if options.quick else options.rounds)
    found = _result(outcomes)
    found.write(options.json)
    for goal in found.missed:
        print(f"missed: {goal}")
    return 1 if found.missed else 0


def _outcomes(
    deployments: Sequence[Deployment],
    run: Callable[[Deployment, int], Outcome],
    seed: int,
    rounds: int,
) -> dict[str, list[Outcome]]:
    """Return the outcomes of each deployment; `run` gets a deployment and a seed."""
    outcomes: dict[str, list[Outcome]] = {deployment.name: [] for deployment in deployments}
    for number in range(rounds):
        for deployment in deployments if number % 2 == 0 else reversed(deployments):
            outcome = run(deployment, seed + number)
            outcomes[deployment.name].append(outcome)
            print(f"{deployment.name}: {_line(outcome)}", flush=True)
    return outcomes


def _run(model: Path, turns: tuple[int, int], deployment: Deployment, seed: int) -> Outcome:
    async def ask(url: str) -> Outcome:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        async with aiohttp.ClientSession(url, timeout=timeout) as http:
            return await Sessions(http, seed, turns).run()

    with reaching(deployment, model) as url:
        return asyncio.run(ask(url))


def _simulate(
    prefill_tps: float,
    decode_tps: float,
    turns: tuple[int, int],
    deployment: Deployment,
    seed: int,
    *,
    has_caches: bool,
) -> Outcome:
    case = AgentsCase(
        proxy={"policy": deployment.policy, **deployment.proxy},
        seed=seed,
        turns=turns,
        prefill_tps=prefill_tps,
        decode_tps=decode_tps,
        host_cache_bytes=_HOST_CACHE_BYTES if has_caches else 0,
        has_files=has_caches,
    )
    return simulate(case)[0]


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


_FIGURES: Final[Mapping[tuple[str, str], Callable[[Outcome], float]]] = {
    ("session, mean", "s"): lambda outcome: statistics.mean(outcome.sessions_s),
    ("session, longest", "s"): lambda outcome: max(outcome.sessions_s),
    ("single turn, mean", "s"): lambda outcome: statistics.mean(outcome.singles_s),
    ("single turn, 95th percentile", "s"): lambda outcome: statistics.quantiles(
        outcome.singles_s, n=20
    )[-1],
    ("prompt tokens computed", "tokens"): lambda outcome: outcome.computed,
    ("computed, as a multiple of the new ones", ""): lambda outcome: outcome.computed / outcome.new,
}


def _line(outcome: Outcome) -> str:
    figures = (f"{name} {value(outcome):.2f} {unit}" for (name, unit), value in _FIGURES.items())
    return "; ".join(figures)


def _result(outcomes: Mapping[str, Sequence[Outcome]]) -> Result:
    held, without = outcomes[_HELD.name], outcomes[_NOT_HELD.name]

    def ratio(value: Callable[[Outcome], float]) -> float:
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
