"""Requests for plain generation, as llama-server's `/completion` takes them. Pure.

`strategy` selects one way of sampling: `greedy`, `top_k` or `top_p`. A request without it that
gives `temperature`, `top_k` or `top_p` is sampled with those, and any other is greedy.

Members that are not listed here are llama-server's own and pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from proxy.batch.prompts import EMPTY_PROMPT, PromptBatch, prompts_of
from proxy.errors import BadRequest, quoted

MAX_TOKENS: Final = 50
TEMPERATURE: Final = 1.0
STRATEGY: Final = "greedy"
TOP_K: Final = 50
TOP_P: Final = 0.9

_OURS: Final = frozenset(
    ("prompt", "prompts", "max_tokens", "temperature", "strategy", "top_k", "top_p", "model_id")
)
# They make another response of a completion.
_REFUSED: Final = ("n", "n_cmpl", "response_fields")


def completion_of(members: Mapping[str, Any], *, is_stream: bool) -> dict[str, Any]:
    """Return the request for one prompt.

    Raises:
        BadRequest: It has no prompt, or a member with a value that means nothing.
    """
    prompt = members.get("prompt")
    if not isinstance(prompt, str):
        raise BadRequest("a prompt must be a string")
    if not prompt:
        raise BadRequest(EMPTY_PROMPT)
    return {**_completion(members, is_stream=is_stream), "prompt": prompt}


def read_batch(members: Mapping[str, Any], max_prompts: int) -> PromptBatch:
    """Return the requests for several prompts.

    Raises:
        BadRequest: As `completion_of` does.
        LimitExceeded: There are too many prompts.
    """
    prompts = prompts_of(members, max_prompts)
    return PromptBatch(prompts, _completion(members, is_stream=False))


def with_model(members: Mapping[str, Any]) -> dict[str, Any]:
    """Return the member `model` of a request, which may call it `model_id`."""
    name = members.get("model") or members.get("model_id")
    return {} if name is None else {"model": name}


def _completion(members: Mapping[str, Any], *, is_stream: bool) -> dict[str, Any]:
    if refused := next((name for name in _REFUSED if members.get(name) not in (None, 1)), None):
        raise BadRequest(f"the member {refused} has no meaning here; send it to /completion")
    given = {name: value for name, value in members.items() if value is not None}
    passed = {name: value for name, value in given.items() if name not in _OURS}
    return {
        **_sampling(given),
        **passed,
        **with_model(given),
        # An engine generates one token also where none is asked for.
        "n_predict": _count(given, "max_tokens", MAX_TOKENS),
        "stream": is_stream,
        "return_tokens": True,
    }


def _sampling(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the engine needs to sample in this way only."""
    temperature = given.get("temperature", TEMPERATURE)
    match given.get("strategy", _implied(given)):
        case "greedy":
            return {"temperature": 0}
        case "top_k":
            k = _count(given, "top_k", TOP_K)
            return {"temperature": temperature, "top_k": k, "top_p": 1, "min_p": 0}
        case "top_p":
            p = given.get("top_p", TOP_P)
            return {"temperature": temperature, "top_k": 0, "top_p": p, "min_p": 0}
        case other:
            raise BadRequest(
                f"Invalid strategy: {quoted(str(other))}; it is greedy, top_k or top_p"
            )


def _implied(given: Mapping[str, Any]) -> str:
    if "top_p" in given:
        return "top_p"
    return "top_k" if given.keys() & {"temperature", "top_k"} else STRATEGY


def _count(given: Mapping[str, Any], name: str, default: int) -> int:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadRequest(f"the member {name} must be a whole number, 1 or more")
    return value
