"""Whether a projector (`mmproj`) is looked for beside a model. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from supervisor.gguf.metadata import Gguf

FLAG: Final = "mmproj"
# The settings and words of a command line with which the user decides. Source: --help.
_DECIDED: Final = frozenset({FLAG, "mmproj-url", "mmproj-auto", "no-mmproj", "mm", "mmu"})


def is_looked_for(model: Gguf, flags: Mapping[str, object], args: Sequence[str]) -> bool:
    """Whether the user leaves the projector open, and the model generates text."""
    words = (word.partition("=")[0] for word in args if word.startswith("-"))
    given = {name.lstrip("-") for name in (*flags, *words)}
    return model.is_causal and model.pooling is None and _DECIDED.isdisjoint(given)
