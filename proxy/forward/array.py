"""A request with an array of prompts, as requests with one prompt each. Pure.

An engine computes the prompts of an array in as many slots as it has, and queues the rest inside:
other requests would wait behind all of them. As requests of their own each takes a lease. An array
that an engine refuses anyway is passed to it.

Source: llama-server, build 10434. An array with a number in it is one prompt in tokens; the
elements of any other are prompts: a string, an array with numbers, or an object. Embeddings read
`input`, else `content`; reranking reads `documents`, else `texts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson

from proxy.endpoints import EndpointKind
from proxy.errors import BadRequest
from proxy.prompt_cache.prompt import read_prompt
from proxy.request import ProxyRequest

# What the parts of one request may have in common, times how often it is sent.
_REPEATED_MAX_BYTES: Final = 64 * 1024**2
_EMBEDDING: Final = frozenset({"/embedding", "/embeddings", "/v1/embeddings"})
_RERANKING: Final = frozenset({"/rerank", "/reranking", "/v1/rerank", "/v1/reranking"})


@dataclass(frozen=True, slots=True)
class PromptArray:
    """The request, and where its prompts are.

    Attributes:
        name: The member that holds the prompts.
        prompts: At least 2.
        choices: Completions of each of them, at least 1.
        is_ranked: The results are ordered by score.
    """

    request: ProxyRequest
    name: str
    prompts: Sequence[Any]
    choices: int
    is_ranked: bool

    @property
    def top_n(self) -> int:
        """How many of the ranked results are wanted."""
        value = self.request.json.get("top_n")
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return value if is_number and value is not None else len(self.prompts)

    def part(self, at: int) -> ProxyRequest:
        """Return the request for one of the prompts, from 0.

        Raises:
            BadRequest: Its other members are nested too deeply to be serialised again.
        """
        prompt, request = self.prompts[at], self.request
        # An array of one is read as the array was; a string is what every other request has.
        value = prompt if isinstance(prompt, str) and not self.is_ranked else [prompt]
        members = {**request.json, self.name: value}
        if self.is_ranked:
            members.pop("top_n", None)
        return replace(
            request,
            json=members,
            body=_written(members),
            prompt=read_prompt(request.kind, request.model, members, request.owner),
            session=None,  # a conversation is in one slot
            is_let_in=at > 0,
        )


def array_of(request: ProxyRequest) -> PromptArray | None:
    """Return the prompts of a request, or None where it has not several.

    Raises:
        BadRequest: `top_n` is negative, which build 10434 notices at the end of the computation, or
            the other members are too large to be sent with each prompt.
    """
    name = _member(request)
    prompts = request.json.get(name) if name else None
    if name is None or not isinstance(prompts, list) or len(prompts) < 2:
        return None
    is_ranked = request.path in _RERANKING
    if not all(isinstance(one, str if is_ranked else str | list | dict) for one in prompts):
        return None
    array = PromptArray(request, name, prompts, request.slots, is_ranked)
    if array.top_n < 0:
        raise BadRequest("top_n must be 0 or more")
    _check_size(array)
    return array


def _check_size(array: PromptArray) -> None:
    most_bytes = _REPEATED_MAX_BYTES // len(array.prompts)
    if len(array.request.body) <= most_bytes:
        return
    beside = {name: value for name, value in array.request.json.items() if name != array.name}
    size_bytes = len(_written(beside))
    if size_bytes > most_bytes:
        raise BadRequest(
            f"the members beside the {len(array.prompts)} prompts have {size_bytes} bytes, and at "
            f"most {most_bytes} are sent with each of so many; send fewer prompts at once"
        )


def _member(request: ProxyRequest) -> str | None:
    members = request.json
    if request.kind in {EndpointKind.COMPLETION, EndpointKind.LLAMA_COMPLETION}:
        return "prompt"
    if request.path in _EMBEDDING:
        return "input" if "input" in members else "content"
    if request.path in _RERANKING:
        return "documents" if "documents" in members else "texts"
    return None


def _written(members: Mapping[str, Any]) -> bytes:
    try:
        return orjson.dumps(members)
    except TypeError as error:
        raise BadRequest(f"the body cannot be split into its prompts: {error}") from error
