"""Reads the meaning of an instance's own error: a client's mistake, or a missing model. Pure.

llama-server reports some mistakes of clients as its own failures, which a client library would
retry twice.

Source: llama-server, build 10434; openai-python and anthropic-python, their exceptions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import orjson

from proxy.errors import UnknownModel, openai_type
from proxy.http.api_formats import parse_error

# The beginning of an error's message, as JSON: whole characters and escapes.
_MESSAGE: Final = re.compile(r'"message":\s*"((?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u]){1,1000})')
_MESSAGE_SEARCHED_BYTES: Final = 8192
# Beginnings of the engine's messages that report a client's mistake as its own failure (500).
_CLIENT_MISTAKES: Final = re.compile(
    r"""
      \[json\.exception\.                       # a member has another type, or is missing
    | Failed\ to\ parse\ (messages|tools|tool\ call\ arguments)  # of a call in the history
    | (image|audio|video)\ input\ is\ not\ supported
    | Unknown\ reasoning\ format
    | '[^']{1,80}'\ is\ required
    | "prompt"\                                 # of embeddings too: empty, or of another type
    | vector::_M_                              # a token outside the vocabulary; top_n below 0
    | (tools|tool_choice)\ param\ requires\ --jinja
    | At\ least\ one\ of\ min_value\ or\ max_value   # a JSON schema's integer
    | got\ exception:\ Unexpected\ empty\ grammar\ stack   # ignore_eos beyond a grammar's end
    | Cannot\ (use|specify|set|have)\           # two members that exclude each other
    # a grammar whose output is no text: without tools, any text has this format
    | The\ model\ produced\ output\ that\ does\ not\ match\ the\ expected\ Content-only
    """,
    re.VERBOSE,
)


# An engine's message for an input of embeddings that is longer than its micro batch.
_TOO_LONG: Final = re.compile(
    r"input \((\d{1,18}) tokens\) is too large to process.*size: (\d{1,18})"
)
# An engine's message for a model without an output for the next token, such as BERT.
_NO_TEXT: Final = re.compile(r"the current context does not (support )?logits computation")
_GENERATES_NOTHING: Final = (
    "this model is for embeddings or ranks and generates no text; "
    "use /v1/embeddings or /v1/rerank, or name another model"
)


def reclassify_error(status: int, body: bytes) -> tuple[int, bytes]:
    """Return the status and the body of an error; the status is 400 for a client's mistake.

    A feature that a model or its engine lacks (501) counts as one: a retry changes nothing.

    Source: llama-server, build 10434, a wrong value for each member of each endpoint
    (`tests/laws/test_mistakes.py`); openai-python and anthropic-python retry from 500 on.
    """
    error = parse_error(body) or {}
    message = str(error.get("message"))
    if status == HTTPStatus.NOT_IMPLEMENTED and error:
        return 400, orjson.dumps({"error": {**error, "code": 400}})
    if status != HTTPStatus.INTERNAL_SERVER_ERROR:
        return status, body
    if found := _TOO_LONG.match(message):
        tokens, limit = map(int, found.groups())
        too_long = {  # as for any other prompt that is longer than the context
            "code": 400,
            "message": f"the input is too large: {tokens} tokens, and this model takes {limit}",
            "type": "exceed_context_size_error",
            "n_prompt_tokens": tokens,
            "n_ctx": limit,
        }
        return 400, orjson.dumps({"error": too_long})
    if is_encoder := _NO_TEXT.match(message):
        error = {**error, "message": _GENERATES_NOTHING}
    if is_encoder or _CLIENT_MISTAKES.match(message):
        mistake = {**error, "code": 400, "type": "invalid_request_error"}
        return 400, orjson.dumps({"error": mistake})
    return status, body


def shorten_error(status: int, beginning: bytes) -> bytes | None:
    """Return an error with the beginning of its message, for a body that is too long to read.

    The engine quotes input that it cannot parse in full, for example a tool call's arguments of
    several megabytes. Returns None if no message begins there.

    Source: nlohmann/json 3.12, parse_error, "last read".
    """
    found = _MESSAGE.search(beginning[:_MESSAGE_SEARCHED_BYTES].decode(errors="replace"))
    if found is None:
        return None
    try:
        message = orjson.loads(f'"{found[1]}"')
    except orjson.JSONDecodeError:
        return None
    message = f"{message}… (the rest is too long to show)"
    error = {"code": status, "message": message, "type": openai_type(status)}
    return orjson.dumps({"error": error})


def status_of(error: Mapping[str, Any]) -> int:
    """Return the status of an error that arrived as an event: 400 to 599, or 500 if it has none."""
    code = error.get("code")
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def is_broken_history(body: bytes) -> bool:
    """Return whether a call of an earlier turn has arguments that are not JSON."""
    return b"Failed to parse tool call arguments as JSON" in body[:_MESSAGE_SEARCHED_BYTES]


def is_model_missing(status: int, body: bytes) -> bool:
    """Return whether a node cannot serve its model: it is unloaded, or no longer exists."""
    code = (parse_error(body) or {}).get("code")
    return status == 503 or (status == 404 and code == UnknownModel.code)


def is_loading(status: int, body: bytes) -> bool:
    error = parse_error(body) or {}
    return status == 503 and error.get("type") == "unavailable_error"
