"""Where two answers part: at which token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import orjson

from supervisor.bench.workloads.requests import post
from supervisor.engine_client.client import EngineClient

_END = "(end)"


@dataclass(frozen=True, slots=True)
class Difference:
    """`token`: the first that differs, from 1, of `tokens` of the baseline."""

    token: int
    tokens: int
    expected: str
    found: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """One request; `difference` is None where the answers are equal."""

    number: int
    difference: Difference | None


def first_difference(expected: Sequence[str], found: Sequence[str]) -> Difference | None:
    """Compare two answers in tokens."""
    for at, (ours, theirs) in enumerate(zip_longest(expected, found, fillvalue=_END)):
        if ours != theirs:
            return Difference(at + 1, len(expected), ours, theirs)
    return None


async def compare(client: EngineClient, model: str, expected: str, found: str) -> Difference | None:
    """Compare two answers in the tokens of a model."""
    if expected == found:
        return None
    ours, theirs = [await _pieces(client, model, text) for text in (expected, found)]
    return first_difference(ours, theirs)


async def _pieces(client: EngineClient, model: str, text: str) -> list[str]:
    members = {"model": model, "content": text, "with_pieces": True}
    body = await post(client, "/tokenize", members)
    return [_piece(one["piece"]) for one in orjson.loads(body)["tokens"]]


def _piece(piece: str | list[int]) -> str:
    """Return a token's text; part of a letter comes as bytes."""
    return piece if isinstance(piece, str) else bytes(piece).decode(errors="backslashreplace")
