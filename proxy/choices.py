"""The number of answers that a request wants for one prompt. Pure.

Source: llama-server, build 10434: `n` and `n_cmpl` mean the same on every page that generates text
but Anthropic's, up to the number of slots; each answer is computed in a slot of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from proxy.endpoints import EndpointKind

# More slots than any instance has; the engine refuses a larger number.
_MAX: Final = 4096


def choices_of(kind: EndpointKind, members: Mapping[str, Any]) -> int:
    """Return the number of answers to each prompt, 1 to 4096.

    Args:
        kind: What the request is.
        members: What the body says, whatever that is.
    """
    if "n" not in members and "n_cmpl" not in members:
        return 1
    if not kind.generates or kind is EndpointKind.MESSAGES:
        return 1
    return max(_count(members.get("n")), _count(members.get("n_cmpl")))


def is_single(members: Mapping[str, Any]) -> bool:
    """Return whether the body wants one answer to one prompt."""
    has_one_choice = members.get("n", 1) in (None, 1) and members.get("n_cmpl", 1) in (None, 1)
    return has_one_choice and _is_one_prompt(members.get("prompt"))


def _is_one_prompt(prompt: object) -> bool:
    """Return whether a prompt is one: a list with a number in it is a single one in tokens."""
    if not isinstance(prompt, list) or len(prompt) < 2:
        return True
    return any(isinstance(part, int) for part in prompt)


def _count(said: object) -> int:
    if isinstance(said, bool) or not isinstance(said, int | float):
        return 1
    return int(min(max(said, 1), _MAX))
