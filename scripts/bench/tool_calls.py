"""Compare the share of valid tool calls with and without `tool_calls = "repair"`.

Cases are of the Berkeley Function Calling Leaderboard, as its package on PyPI ships them: a
question and the function that answers it. The two cases before it, with their right calls, stand
before the question: a model of 135 million parameters calls nothing without an example. Each case
has its own seed, at temperature 0.8, and is asked in both ways.

The model is asked with two templates. In one a call stands in tags, behind which the engine's
grammar allows only calls that the schema does; in the other it is bare JSON, as with Llama 3, and
free text.

Both engines work at the same time, with one thread each, and compute some cases together. All cases
take an hour or more on two cores. So `--keep` keeps the outcomes in a file; a later run asks only
what is not in it, and the figures are those of all cases in it. `--minutes` ends a run early.

A call is valid if it is of a tool of the request and its arguments are a JSON object that the
tool's schema allows, by another library than the proxy's own. An answer without a call is neither
valid nor broken: text never becomes a call.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, NamedTuple

import aiohttp
import jsonschema
from support.corral_cli import CorralCli

from scripts.bench.mixed_requests import session
from scripts.bench.result import Result, one_round
from supervisor.models import pinned
from supervisor.system.paths import directories

_FILE: Final = "BFCL_v4_simple_python.json"
_TYPES: Final = {"dict": "object", "float": "number", "tuple": "array"}
_WAYS: Final = ("pass", "repair")
_TEMPLATES: Final = ("tags", "bare")
_EXAMPLES: Final = 2
_CTX_TOKENS: Final = 4096
# Cases that an engine computes together: its threads read the weights once for all.
_AT_ONCE: Final = 4
_SETTINGS: Final = """
[models.tags]
path = "{model}"
[models.tags.flags]
chat-template-file = "{root}/tests/clients/tools.jinja"
ctx-size = {ctx_tokens}
parallel = {parallel}
threads = 1
threads-batch = 1

[models.bare]
path = "{model}"
[models.bare.flags]
chat-template-file = "{root}/scripts/bench/bare_calls.jinja"
ctx-size = {ctx_tokens}
parallel = {parallel}
threads = 1
threads-batch = 1
"""

Message = dict[str, Any]


class Case(NamedTuple):
    question: str
    tool: Mapping[str, Any]
    arguments: Mapping[str, Any]  # one right answer


class _Asked(NamedTuple):
    template: str
    number: int
    body: Mapping[str, Any]


def main() -> int:
    """Print the shares; return 1 if repairing calls did not raise that of valid ones."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("package", type=Path, help="the wheel of bfcl-eval")
    parser.add_argument(
        "--cases", type=_range, default=range(1, 301), metavar="FIRST-LAST", help="cases, from 1"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FILE",
        help="keep outcomes there, and go on from it",
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no case after these")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    cases, outcomes = _read(options.package), _Outcomes(options.keep)
    asked = [
        _Asked(template, number, _body(template, cases, number, options.max_tokens))
        for number in options.cases
        for template in (_TEMPLATES if number + _EXAMPLES <= len(cases) else ())
    ]
    model = pinned.fetch(pinned.find_pin("smollm2"), directories().models, lambda *_: None)
    root = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory(prefix="corral-") as home:
        corral = CorralCli(Path(home))
        ctx_tokens = _CTX_TOKENS * _AT_ONCE
        corral.configure(
            _SETTINGS.format(model=model, root=root, ctx_tokens=ctx_tokens, parallel=_AT_ONCE)
        )
        corral.ok("start")
        try:
            asyncio.run(_ask_all(corral.url, asked, options.minutes, outcomes))
        finally:
            corral.end()
    found = _result(outcomes.counts())
    for figure in found.figures:
        shares = ", ".join(f"{way} {values[0]:.3g}" for way, values in figure.values.items())
        print(f"{figure.name}: {shares}")
    for goal, is_met in found.goals.items():
        print(f"{'met' if is_met else 'missed'}: {goal}")
    found.write(options.json)
    return 1 if found.missed else 0


def _read(package: Path) -> list[Case]:
    with zipfile.ZipFile(package) as wheel:
        folder = "bfcl_eval/data"
        asked = wheel.read(f"{folder}/{_FILE}").decode().splitlines()
        answers = wheel.read(f"{folder}/possible_answer/{_FILE}").decode().splitlines()
    cases: list[Case] = []
    for line, answer in zip(map(json.loads, asked), map(json.loads, answers), strict=True):
        (function,) = line["function"]
        (call,) = answer["ground_truth"]
        (possible,) = call.values()
        right = {name: values[0] for name, values in possible.items() if values[0] != ""}
        tool = {**function, "name": function["name"].replace(".", "_")}
        tool["parameters"] = _schema(function["parameters"])
        if jsonschema.Draft202012Validator(tool["parameters"]).is_valid(right):
            cases.append(Case(line["question"][0][0]["content"], tool, right))
    return cases


def _schema(given: Any) -> Any:
    """Return a JSON schema for the leaderboard's own notation, which names Python's types."""
    if isinstance(given, list):
        return list(map(_schema, given))
    if not isinstance(given, dict):
        return given
    schema = {name: _schema(value) for name, value in given.items() if name != "optional"}
    if (kind := given.get("type")) == "any":
        del schema["type"]
    elif isinstance(kind, str):
        schema["type"] = _TYPES.get(kind, kind)
    return schema


class _Outcomes:
    """The outcome of each case, by template and way; also in a file, if one is named."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[tuple[str, str, int], str] = {}
        if path and path.exists():
            for template, way, case, outcome in map(json.loads, path.read_text().splitlines()):
                self._known[template, way, case] = outcome

    def __contains__(self, asked: tuple[str, str, int]) -> bool:
        return asked in self._known

    def add(self, asked: tuple[str, str, int], outcome: str) -> None:
        self._known[asked] = outcome
        if self._path:
            with self._path.open("a") as file:
                file.write(json.dumps([*asked, outcome]) + "\n")

    def counts(self) -> Mapping[str, Mapping[str, Counter[str]]]:
        """Return the numbers of outcomes, of cases that were asked in both ways."""
        found = {name: {way: Counter[str]() for way in _WAYS} for name in _TEMPLATES}
        for (template, way, case), outcome in self._known.items():
            if all((template, other, case) in self._known for other in _WAYS):
                found[template][way][outcome] += 1
        return found


def _range(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


async def _ask_all(url: str, asked: Sequence[_Asked], minutes: float, outcomes: _Outcomes) -> None:
    """Ask all in both ways, those of each template in turn by a few workers."""
    async with session(url) as http, asyncio.TaskGroup() as group:
        ends_at_s = asyncio.get_running_loop().time() + 60 * minutes
        for template in _TEMPLATES:
            left = iter([case for case in asked if case.template == template])
            for _ in range(_AT_ONCE):
                group.create_task(_ask_some(http, left, ends_at_s, outcomes))


async def _ask_some(
    http: aiohttp.ClientSession, left: Iterator[_Asked], ends_at_s: float, outcomes: _Outcomes
) -> None:
    clock = asyncio.get_running_loop().time
    for case in takewhile(lambda _: clock() < ends_at_s, left):
        for way in _WAYS:
            if (key := (case.template, way, case.number)) not in outcomes:
                outcomes.add(key, await _ask(http, case.body, way))


def _body(template: str, cases: Sequence[Case], number: int, max_tokens: int) -> dict[str, Any]:
    at = number + _EXAMPLES - 1  # in the list: the first ones are examples only
    examples, case = cases[at - _EXAMPLES : at], cases[at]
    tools = {known.tool["name"]: known.tool for known in (*examples, case)}
    return {
        "model": template,
        "messages": [*_history(examples), {"role": "user", "content": case.question}],
        "tools": [{"type": "function", "function": tool} for tool in tools.values()],
        "max_tokens": max_tokens,
        "temperature": 0.8,
        "seed": at,
    }


def _history(examples: Sequence[Case]) -> Iterator[Message]:
    for number, example in enumerate(examples):
        arguments = json.dumps(example.arguments)
        function = {"name": example.tool["name"], "arguments": arguments}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        yield {"role": "user", "content": example.question}
        yield {"role": "assistant", "tool_calls": [call]}
        yield {"role": "tool", "tool_call_id": call["id"], "content": "done"}


async def _ask(http: aiohttp.ClientSession, body: Mapping[str, Any], way: str) -> str:
    headers = {"X-Corral-Tool-Calls": way}
    async with http.post("/v1/chat/completions", json=body, headers=headers) as response:
        answered = await response.json()
    if response.status != 200:
        return "error"
    calls = answered["choices"][0]["message"].get("tool_calls") or []
    if not calls:
        return "no call"
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in body["tools"]}
    is_valid = all(_is_valid(call["function"], schemas) for call in calls)
    return "valid" if is_valid else "broken"


def _is_valid(call: Mapping[str, str], schemas: Mapping[str, Any]) -> bool:
    try:
        arguments = json.loads(call["arguments"])
    except ValueError:
        return False
    schema = schemas.get(call["name"])
    return schema is not None and jsonschema.Draft202012Validator(schema).is_valid(arguments)


def _result(outcomes: Mapping[str, Mapping[str, Counter[str]]]) -> Result:
    figures, goals = [], {}
    for name, by_way in outcomes.items():
        count = by_way["pass"].total()
        for kind in ("valid", "broken", "error", "no call"):
            counts = {way: float(by_way[way][kind]) for way in _WAYS}
            figures.append(one_round(f"{name}: {kind}, of {count}", "", counts))
        shares = {
            way: found["valid"] / max(1, found.total() - found["no call"])
            for way, found in by_way.items()
        }
        figures.append(one_round(f"{name}: valid, of calls and errors", "", shares))
        repaired, passed = shares["repair"], shares["pass"]
        goals[f"{name}: {repaired:.3f} valid with repair, {passed:.3f} without"] = (
            repaired > passed or repaired == 1
        )
        broken = by_way["repair"]["broken"]
        goals[f"{name}: broken calls that reach a client with repair: {broken}"] = not broken
    return Result(figures, goals)


if __name__ == "__main__":
    sys.exit(main())
