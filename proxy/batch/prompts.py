"""The body of `POST /v1/batch/completions`. Pure.

Names and defaults are those of realizar 0.8.5, `GpuBatchRequest`; every other member is
llama-server's and is sent with each prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from proxy.endpoints import EndpointKind, choices_of
from proxy.errors import BadRequest, LimitExceeded

# Source: realizar 0.8.5, src/api, `default_max_tokens` and `default_top_k`.
_MAX_TOKENS: Final = 50
_DEFAULTS: Final = MappingProxyType({"temperature": 0.0, "top_k": 50, "stop": []})
# Read here, or set: the answer is not a stream, and has the members that results are made of.
_OURS: Final = frozenset({"prompts", "prompt", "max_tokens", "response_fields"})
_NUMBER: Final = (int, float)
EMPTY_PROMPT: Final = "Prompt cannot be empty"


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """The prompts, and the members of llama-server's `/completion` that they share."""

    prompts: Sequence[str]
    shared: Mapping[str, Any]

    def members(self, index: int) -> Mapping[str, Any]:
        """Return the body for one prompt."""
        return {**self.shared, "prompt": self.prompts[index]}


def read_batch(members: Mapping[str, Any], max_prompts: int) -> PromptBatch:
    """Read a body.

    Raises:
        BadRequest: A prompt is empty or there is none, or a member has a wrong type.
        LimitExceeded: There are too many prompts.
    """
    prompts = prompts_of(members, max_prompts)
    _check_numbers(members)
    if choices_of(EndpointKind.LLAMA_COMPLETION, members) > 1:
        raise BadRequest("n must be 1; repeat a prompt for several answers to it")
    shared = {name: value for name, value in members.items() if name not in _OURS}
    max_tokens = members.get("max_tokens")
    if max_tokens is not None or "n_predict" not in shared:
        shared["n_predict"] = _MAX_TOKENS if max_tokens is None else max_tokens
    return PromptBatch(prompts, {**_DEFAULTS, **shared, "return_tokens": True})


def prompts_of(members: Mapping[str, Any], max_prompts: int) -> list[str]:
    """Return the prompts of a body; raises as `read_batch` does."""
    prompts = members.get("prompts")
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise BadRequest("prompts must be a list of strings")
    if not prompts:
        raise BadRequest("Prompts array cannot be empty")
    if not all(prompts):
        raise BadRequest(EMPTY_PROMPT)
    if len(prompts) > max_prompts:
        raise LimitExceeded(
            f"prompts has {len(prompts)} entries, more than {max_prompts}; "
            "send fewer, or raise queue_size under [proxy.batch]"
        )
    return prompts


def _check_numbers(members: Mapping[str, Any]) -> None:
    # An engine generates one token even if the limit is 0.
    for name, least in (("max_tokens", 1), ("top_k", 0)):
        value = members.get(name, least)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise BadRequest(f"{name} must be a whole number, {least} or more")
    value = members.get("temperature", 0)
    if not isinstance(value, _NUMBER) or isinstance(value, bool):
        raise BadRequest("temperature must be a number")
    stop = members.get("stop", [])
    if not isinstance(stop, str) and not _is_texts(stop):
        raise BadRequest("stop must be a list of strings")


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)
