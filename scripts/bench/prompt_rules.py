"""Compare a model's answers to captured prompts with and without prompt rules.

The captures are of `corral capture`, or of `scripts/clients --capture`. Each prompt is sent as it
was captured, with the rules that `corral connect` names for its client, and, for a scale, with
other values at the old places: each value of the rules' kinds has another last digit or letter, as
in another directory or on another day. Prompts that the rules do not change are left out.

The answer to the captured prompt is taken at temperature 0. The other two prompts are continued
with its tokens: at each of them, the most likely token is compared, and the token's log
probability. Tools are left out of all prompts, since the templates of small models write none.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp

from proxy.cache.prompt_rules import apply_rules
from proxy.request.chat_form import chat_form
from proxy.upstream.endpoint_kinds import EndpointKind
from scripts.bench.plain_engine import plain
from scripts.bench.result import Result, one_round
from supervisor.clients.programs import CLIENTS
from supervisor.experiments.capture_lines import read_chats
from supervisor.models import pinned
from supervisor.system.paths import directories

VARIANTS: Final = ("rules", "other values")
# A token below these has their least log probability.
_PROBABLE: Final = 200
_MOST_LIKELY: Final = 10

# The log probabilities by token of the most likely ones at one place, the first first.
Likely = Mapping[int, float]
Body = dict[str, Any]


@dataclass
class Comparison:
    """What one variant of a prompt changes at the tokens of the answer to the captured prompt."""

    is_equal: list[bool] = field(default_factory=list)  # The most likely token, at each place.
    lost: list[float] = field(default_factory=list)  # Log probability of the answer's tokens.
    overlap: float = 0.0  # Share of the ten most likely first tokens that are the same.


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("captures", nargs="+", type=Path, metavar="CAPTURE")
    parser.add_argument("--client", required=True, metavar="NAME", help="claude or opencode")
    parser.add_argument("--model", type=Path, metavar="GGUF", help="instead of SmolLM2")
    parser.add_argument("--ctx", type=int, default=8192, metavar="N", help="of the model")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="of an answer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    rules = next(client.prompt_rules for client in CLIENTS if client.name == options.client)
    model = options.model or pinned.find_pin("smollm2").path(directories().models)
    slots = 1 + len(VARIANTS)
    words = ["--jinja", "--no-kv-unified", "--slot-prompt-similarity", "0", "--cache-ram", "0"]
    sizes = map(str, ["--parallel", slots, "--ctx-size", slots * options.ctx])
    with plain("--model", model, *words, *sizes) as url:
        found = asyncio.run(_compare_all(url, options.captures, rules, options.ctx, options.tokens))
    if not found:
        parser.error("the rules change none of these prompts")
    result = summary(found)
    for figure in result.figures:
        means = (f"{variant} {mean:.3f}" for variant, (mean,) in figure.values.items())
        print(f"{figure.name}: {', '.join(means)}")
    print(*result.notes)
    result.write(options.json)
    return 0


def variants(kind: EndpointKind, body: Body, rules: Sequence[str]) -> tuple[Body, Body] | None:
    """Return a body with the rules, and with other values; None if the rules change nothing."""
    changed, applied, _ = apply_rules(rules, kind, body)
    if not applied:
        return None
    freeze = [f"freeze:{rule.partition(':')[2]}" for rule in applied]
    _, _, values = apply_rules(freeze, kind, body)
    others = {text: tuple(map(_other, kept)) for text, kept in values.items()}
    return changed, apply_rules(freeze, kind, body, others)[0]


def _other(value: str) -> str:
    """Return a value with another last digit or letter."""
    at = max((at for at, char in enumerate(value) if char.isalnum()), default=0)
    other = "01"[value[at] == "0"] if value[at].isdigit() else "ab"[value[at] == "a"]
    return value[:at] + other + value[at + 1 :]


async def _compare_all(
    url: str, captures: Sequence[Path], rules: Sequence[str], ctx: int, tokens: int
) -> list[tuple[Comparison, Comparison]]:
    found = []
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout()) as http:
        for kind, name, body in (chat for path in captures for chat in read_chats(path)):
            if not (changed := variants(kind, body, rules)):
                continue
            prompts = [await _prompt(http, kind, variant) for variant in (body, *changed)]
            if max(map(len, prompts)) + tokens > ctx:
                print(f"{name}: {len(prompts[0])} tokens do not fit", file=sys.stderr)
                continue
            captured = await _answer(http, prompts[0], 0, tokens)
            answer = [next(iter(likely)) for likely in captured]
            pair = []
            for slot, prompt in enumerate(prompts[1:], 1):
                others = [
                    (await _answer(http, [*prompt, *answer[:at]], slot, 1))[0]
                    for at in range(len(answer))
                ]
                pair.append(compare(captured, others))
            found.append((pair[0], pair[1]))
            print(f"{name}: {len(prompts[0])} tokens, {_line(pair)}", file=sys.stderr, flush=True)
    return found


def _line(pair: Sequence[Comparison]) -> str:
    parts = zip(VARIANTS, pair, strict=True)
    return ", ".join(
        f"{name} {sum(found.is_equal)} of {len(found.is_equal)}" for name, found in parts
    )


async def _prompt(http: aiohttp.ClientSession, kind: EndpointKind, body: Body) -> list[int]:
    chat = chat_form(kind, body)
    assert chat is not None  # noqa: S101 (the engine has answered it)
    rendered = await _post(http, "/apply-template", {"messages": chat["messages"]})
    content = {"content": rendered["prompt"], "parse_special": True, "add_special": True}
    tokens: list[int] = (await _post(http, "/tokenize", content))["tokens"]
    return tokens


async def _answer(
    http: aiohttp.ClientSession, prompt: Sequence[int], slot: int, tokens: int
) -> list[Likely]:
    """Return the most likely tokens at each place of the answer at temperature 0."""
    body = {"prompt": prompt, "n_predict": tokens, "temperature": 0, "n_probs": _PROBABLE}
    page = await _post(http, "/completion", {**body, "id_slot": slot, "cache_prompt": True})
    return [
        {token["id"]: token["logprob"] for token in place["top_logprobs"]}
        for place in page["completion_probabilities"]
    ]


async def _post(http: aiohttp.ClientSession, path: str, body: Mapping[str, Any]) -> Body:
    async with http.post(path, json=body) as response:
        response.raise_for_status()
        page: Body = await response.json()
        return page


def compare(captured: Sequence[Likely], others: Sequence[Likely]) -> Comparison:
    """Compare the tokens of the answer to the captured prompt, the most likely ones there."""
    found = Comparison()
    for likely, other in zip(captured, others, strict=True):
        token = next(iter(likely))
        found.is_equal.append(next(iter(other)) == token)
        found.lost.append(likely[token] - other.get(token, min(other.values())))
    first, other_first = ({*[*places[0]][:_MOST_LIKELY]} for places in (captured, others))
    found.overlap = len(first & other_first) / _MOST_LIKELY
    return found


_FIGURES: Final[Mapping[str, Callable[[Comparison], float]]] = {
    "same answer": lambda found: all(found.is_equal),
    "same first token": lambda found: found.is_equal[0],
    "same of the ten most likely first tokens": lambda found: found.overlap,
    "same tokens, each after those before": lambda found: statistics.mean(found.is_equal),
    "log probability that a token lost": lambda found: statistics.mean(found.lost),
}


def summary(found: Sequence[tuple[Comparison, Comparison]]) -> Result:
    """Return the means over all prompts."""
    figures = []
    for name, value in _FIGURES.items():
        means = {
            variant: statistics.mean(value(pair[at]) for pair in found)
            for at, variant in enumerate(VARIANTS)
        }
        figures.append(one_round(name, "", means))
    return Result(figures, notes=[f"{len(found)} prompts"])


if __name__ == "__main__":
    sys.exit(main())
