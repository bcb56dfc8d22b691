"""In which ways an engine guesses tokens ahead, and how many at once. Pure.

Source: common_speculative_n_max of llama.cpp, and the defaults in --help of build 10434.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from supervisor.engines.help import FlagValue
from supervisor.flags.auto import positive

# The option that bounds what is guessed at once, and its default; ngram-cache has none.
_BOUNDS: Final[Mapping[str, tuple[str, int]]] = MappingProxyType(
    {
        "ngram-mod": ("spec-ngram-mod-n-max", 64),
        "ngram-simple": ("spec-ngram-simple-size-m", 48),
        "ngram-map-k": ("spec-ngram-map-k-size-m", 48),
        "ngram-map-k4v": ("spec-ngram-map-k4v-size-m", 48),
        "ngram-cache": ("", 8),
    }
)
_BY_MODEL: Final = ("spec-draft-n-max", 3)
# Before b9464 a draft model was enough, and guessed up to 16 tokens.
_UNNAMED: Final = ("spec-draft-n-max", 16)


def kinds(chosen: Mapping[str, FlagValue]) -> list[str]:
    """Return the ways in which it guesses, as `--spec-type` names them; none where it does not.

    Args:
        chosen: Settings by today's names.
    """
    otherwise = "draft" if "spec-draft-model" in chosen else "none"
    found = str(chosen.get("spec-type", otherwise)).split(",")
    return [kind for kind in found if kind not in {"", "none"}]


def longest(chosen: Mapping[str, FlagValue]) -> int:
    """Return how many tokens are guessed at once for a sequence, at most; 0 where none is.

    Raises:
        SettingsInvalid: A bound is no number above 0.
    """
    bounds = [
        _UNNAMED if kind == "draft" else _BOUNDS.get(kind, _BY_MODEL) for kind in kinds(chosen)
    ]
    return max((positive(option, chosen.get(option, most)) for option, most in bounds), default=0)
