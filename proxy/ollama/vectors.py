"""An engine's embeddings as Ollama's API has them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def vectors_of(body: Mapping[str, Any], dimensions: int | None) -> list[Sequence[float]]:
    """Return the vectors in the order of their texts; raises what another format raises."""
    ordered = sorted(body["data"], key=lambda one: int(one["index"]))
    return [_cut(one["embedding"], dimensions) for one in ordered]


def prompt_tokens(body: Mapping[str, Any]) -> int:
    return int((body.get("usage") or {}).get("prompt_tokens", 0))


def _cut(vector: Sequence[float], dimensions: int | None) -> Sequence[float]:
    """Return the first of its values, of length 1 again; unchanged where it has no more."""
    if dimensions is None or dimensions >= len(vector):
        return vector
    kept = vector[:dimensions]
    length = math.sqrt(sum(value * value for value in kept)) or 1.0
    return [value / length for value in kept]
