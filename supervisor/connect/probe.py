"""The request that shows whether a client's settings work. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from supervisor.connect.client import Api

_PROMPT: Final = "Say hello."
# The Responses API wants 16 at least.
_MAX_TOKENS: Final = 16
_ENDS: Final = {
    Api.MESSAGES: ("message_stop",),
    Api.RESPONSES: ("response.completed", "response.incomplete"),
    Api.CHAT: ("[DONE]",),
}


def body(api: Api, model: str) -> Mapping[str, Any]:
    """Return a short request as the client sends it: for a stream."""
    messages = [{"role": "user", "content": _PROMPT}]
    match api:
        case Api.RESPONSES:
            return {
                "model": model,
                "input": [{"type": "message", **messages[0]}],
                "max_output_tokens": _MAX_TOKENS,
                "stream": True,
                "store": False,
            }
        case Api.MESSAGES | Api.CHAT:
            return {
                "model": model,
                "messages": messages,
                "max_tokens": _MAX_TOKENS,
                "stream": True,
            }


def headers(api: Api) -> Mapping[str, str]:
    return {"anthropic-version": "2023-06-01"} if api is Api.MESSAGES else {}


def is_complete(api: Api, stream: str) -> bool:
    """Return whether a stream has the last event of an answer."""
    return any(end in stream for end in _ENDS[api])
