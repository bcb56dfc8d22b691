"""An instance's own error in the shape that the client's library understands. Pure.

llama-server gives `code` as a number and says the same on every page. OpenAI's clients take `code`
for a string or null, and know one for a prompt that is too long; Anthropic's have a shape of their
own. Message, type and figures stay as the instance gave them. Its own pages are for its own
clients: there, nothing is changed. It takes some mistakes of clients for faults of its own, for
which a client's library would ask twice more.

Source: llama-server, build 10434; openai-python and anthropic-python, their exceptions.
"""

from __future__ import annotations

import re
from typing import Any, Final

import orjson

from proxy.pages import Kind

_OPENAI: Final = frozenset({Kind.CHAT, Kind.COMPLETION, Kind.RESPONSES, Kind.BATCH, Kind.SPEECH})
_CODES: Final = {"exceed_context_size_error": "context_length_exceeded"}
_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# How it begins to tell of a mistake that it takes for a fault.
_MISTAKES: Final = (
    "image input is not supported",
    "audio input is not supported",
    "Failed to parse messages",
    "Failed to parse tools",
)


# What an engine says of an input for an embedding that is longer than its micro batch.
_TOO_LONG: Final = re.compile(
    r"input \((\d{1,18}) tokens\) is too large to process.*size: (\d{1,18})"
)


def judged(status: int, body: bytes) -> tuple[int, bytes]:
    """Return the status and the body of an error, a client's mistake called what it is."""
    error = error_of(body) or {}
    if status == 500 and (found := _TOO_LONG.match(str(error.get("message")))):
        return 400, orjson.dumps({"error": _too_long(*map(int, found.groups()))})
    if status == 500 and str(error.get("message")).startswith(_MISTAKES):
        mistake = {**error, "code": 400, "type": "invalid_request_error"}
        return 400, orjson.dumps({"error": mistake})
    return status, body


def _too_long(tokens: int, limit: int) -> dict[str, Any]:
    """Return what an engine says of any other prompt that is longer than the context."""
    return {
        "code": 400,
        "message": f"the input has {tokens} tokens, and this model takes {limit} at most",
        "type": "exceed_context_size_error",
        "n_prompt_tokens": tokens,
        "n_ctx": limit,
    }


def refusal(kind: Kind, path: str, status: int, body: bytes) -> bytes:
    """Return the body of an error as the client gets it.

    Args:
        kind: What was asked.
        path: Path of the page.
        status: HTTP status of the error.
        body: What the instance said, whatever that is.
    """
    error = error_of(body)
    if error is None:
        return body
    if path.startswith("/v1/messages"):
        kept = {name: said for name, said in error.items() if name != "code"}
        named = {**kept, "type": _ANTHROPIC_TYPES.get(status, "api_error")}
        return orjson.dumps({"type": "error", "error": named})
    if kind in _OPENAI:
        code = _CODES.get(str(error.get("type")), error.get("type"))
        return orjson.dumps({"error": {"param": None, **error, "code": code}})
    return body


def error_of(body: bytes) -> dict[str, Any] | None:
    """Return the error that a body of llama-server tells, or None where it tells none."""
    try:
        said = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    error = said.get("error") if isinstance(said, dict) else None
    return error if isinstance(error, dict) else None


def is_loading(status: int, body: bytes) -> bool:
    """Return whether an instance says that its model is not loaded yet: nothing was done."""
    error = error_of(body) or {}
    return status == 503 and error.get("type") == "unavailable_error"
