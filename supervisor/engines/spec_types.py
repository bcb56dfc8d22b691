"""The values of `--spec-type`: how an engine drafts tokens, and how many at once. Pure.

Source: llama.cpp, common_speculative_n_max; --spec-type and the defaults in --help of builds 10434
and 11434.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from supervisor.engines.help import FlagValue

# The option that limits the tokens drafted at once, and its default. ngram-cache has no option.
_NGRAM_LIMITS: Final[Mapping[str, tuple[str, int]]] = MappingProxyType(
    {
        "ngram-mod": ("spec-ngram-mod-n-max", 64),
        "ngram-simple": ("spec-ngram-simple-size-m", 48),
        "ngram-map-k": ("spec-ngram-map-k-size-m", 48),
        "ngram-map-k4v": ("spec-ngram-map-k4v-size-m", 48),
        "ngram-cache": ("", 8),
    }
)
# Drafting with layers of the model's own (multi-token prediction).
MTP: Final = "draft-mtp"
# draft-simple, draft-eagle3, draft-mtp.
_MODEL_LIMIT: Final = ("spec-draft-n-max", 3)
# Before b9464 a draft model alone turned drafting on, of up to 16 tokens.
_UNNAMED: Final = "draft"
_UNNAMED_LIMIT: Final = ("spec-draft-n-max", 16)


def spec_types(chosen: Mapping[str, FlagValue]) -> list[str]:
    """The types in use under options by today's names; empty without drafting."""
    default = _UNNAMED if "spec-draft-model" in chosen else "none"
    kinds = str(chosen.get("spec-type", default)).split(",")
    return [kind for kind in kinds if kind not in {"", "none"}]


def draft_limits(chosen: Mapping[str, FlagValue]) -> Iterator[tuple[str, int]]:
    """The option that limits the tokens drafted at once, with its default, for each type in use."""
    for kind in spec_types(chosen):
        yield _UNNAMED_LIMIT if kind == _UNNAMED else _NGRAM_LIMITS.get(kind, _MODEL_LIMIT)


def needs_draft_cache(kind: str) -> bool:
    """Whether a type fails where its KV cache lacks a prompt that the model's has.

    N-grams are looked up in the text. Layers of the model's own draft less well. Source: measured
    on build 10434.
    """
    return kind not in _NGRAM_LIMITS and kind != MTP
