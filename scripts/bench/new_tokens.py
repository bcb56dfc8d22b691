"""How many prompt tokens of a run are new: those that a cache which forgets nothing computes.

New are the tokens of a prompt behind its longest common prefix with any turn, of any conversation,
whose first token had come when the engine began with this one: with its prompt, and with its answer
but for the last token, which an engine samples and does not evaluate. At least one token of each
prompt is new. A prompt that waits until the prefix which it shares is computed can
need fewer: its distinct tokens are those behind its longest common prefix with any turn that began
before. The engine renders and tokenises the prompts, so their lengths must be those that it
counted while it answered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

import aiohttp

from scripts.bench.conversations import Turn


@dataclass(frozen=True)
class TurnTokens:
    """The tokens of a turn.

    Attributes:
        began_at_s: When the engine began with its prompt; monotonic.
        first_token_at_s: Monotonic; its prompt was computed then.
        prompt: Number of tokens of the prompt.
        held: The prompt, and all evaluated tokens of the answer.
    """

    began_at_s: float
    first_token_at_s: float
    prompt: int
    held: Sequence[int]


@dataclass
class _Node:
    """A token of all sequences that begin alike."""

    after: dict[int, _Node] = field(default_factory=dict)


def new_tokens(turns: Iterable[TurnTokens]) -> int:
    """Return the new tokens of all prompts."""
    root, new = _Node(), 0
    computed = sorted(turns, key=lambda turn: turn.first_token_at_s)
    added = 0
    for turn in sorted(computed, key=attrgetter("began_at_s")):
        while computed[added].first_token_at_s <= turn.began_at_s:
            _add(root, computed[added].held)
            added += 1
        new += turn.prompt - min(_known(root, turn.held), turn.prompt - 1)
    return new


def distinct_tokens(turns: Iterable[TurnTokens]) -> int:
    """Return the tokens of all prompts if each prefix is computed once."""
    root, distinct = _Node(), 0
    for turn in sorted(turns, key=attrgetter("began_at_s")):
        distinct += turn.prompt - min(_known(root, turn.held), turn.prompt - 1)
        _add(root, turn.held)
    return distinct


def _add(node: _Node, tokens: Sequence[int]) -> None:
    for token in tokens:
        node = node.after.setdefault(token, _Node())


def _known(root: _Node, tokens: Sequence[int]) -> int:
    """Return the length of the longest prefix that was added."""
    node: _Node | None = root
    for number, token in enumerate(tokens):
        node = node.after.get(token) if node else None
        if node is None:
            return number
    return len(tokens)


async def count(
    url: str, turns: Sequence[Turn], headers: Mapping[str, str] | None = None
) -> tuple[int, int]:
    """Return the new and the distinct tokens of a run, whose engines still serve.

    Raises:
        RuntimeError: A prompt has another length than the engine counted.
    """
    async with aiohttp.ClientSession(url, headers=headers) as http:
        found = [await _tokens(http, turn) for turn in turns]
    return new_tokens(found), distinct_tokens(found)


async def _tokens(http: aiohttp.ClientSession, turn: Turn) -> TurnTokens:
    request = {"model": turn.model, "messages": turn.messages}
    async with http.post("/apply-template", json=request) as response:
        text = (await response.json())["prompt"]
    prompt = len(await _tokenize(http, turn.model, text))
    counted = turn.result.prefilled + turn.result.cached
    if prompt != counted:
        raise RuntimeError(f"a prompt of {counted} tokens has {prompt} when tokenised")
    held = await _tokenize(http, turn.model, text + turn.text)
    first_at_s = turn.began_at_s + turn.result.first_token_s
    evaluated = prompt + turn.result.decoded - 1
    return TurnTokens(first_at_s - turn.result.prefill_s, first_at_s, prompt, held[:evaluated])


async def _tokenize(http: aiohttp.ClientSession, model: str, text: str) -> list[int]:
    body = {"model": model, "content": text, "add_special": True, "parse_special": True}
    async with http.post("/tokenize", json=body) as response:
        tokens: list[int] = (await response.json())["tokens"]
    return tokens
