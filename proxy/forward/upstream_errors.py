"""An instance's own error in the format of the client's API. Pure.

llama-server has a number as `code` in every API. OpenAI's clients expect a string or null, and know
one for a prompt that is too long; Anthropic's have a format of their own. Message, type and figures
stay. llama-server's own endpoints are not changed. It reports some mistakes of clients as its own
failures, which a client library would retry twice.

Source: llama-server, build 10434; openai-python and anthropic-python, their exceptions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

import orjson

from proxy.errors import UnknownModel, anthropic_type, openai_type
from proxy.upstream.endpoint_kinds import EndpointKind

_OPENAI: Final = frozenset(
    {
        EndpointKind.CHAT,
        EndpointKind.COMPLETION,
        EndpointKind.RESPONSES,
        EndpointKind.EMBED_OR_RERANK,
        EndpointKind.TRANSCRIPTION,
    }
)
_CODES: Final = {"exceed_context_size_error": "context_length_exceeded"}
_NAME: Final = re.compile(r"[a-z0-9_]{1,64}")
_SHOWN_BYTES: Final = 200
# What begins the message of an error, as JSON: whole characters and escapes.
_MESSAGE: Final = re.compile(r'"message":\s*"((?:[^"\\]|\\u[0-9a-fA-F]{4}|\\[^u]){1,1000})')
_MESSAGE_SEARCHED_BYTES: Final = 8192
# How its message begins where it takes a client's mistake for a fault of its own (500).
_CLIENT_MISTAKES: Final = re.compile(
    r"""
      \[json\.exception\.                       # a member of another type, or one that is missing
    | Failed\ to\ parse\ (messages|tools|tool\ call\ arguments)  # of a call in the history
    | (image|audio|video)\ input\ is\ not\ supported
    | Unknown\ reasoning\ format
    | '[^']{1,80}'\ is\ required
    | "prompt"\                                 # of embeddings too: empty, or of another type
    | vector::_M_                              # a token that the vocabulary has not; top_n below 0
    | (tools|tool_choice)\ param\ requires\ --jinja
    | At\ least\ one\ of\ min_value\ or\ max_value   # a JSON schema's integer
    | got\ exception:\ Unexpected\ empty\ grammar\ stack   # ignore_eos beyond a grammar's end
    | Cannot\ (use|specify|set|have)\           # two members that exclude each other
    # a grammar of what is no text: without tools, any text is of this format
    | The\ model\ produced\ output\ that\ does\ not\ match\ the\ expected\ Content-only
    """,
    re.VERBOSE,
)


# What an engine says of an input for an embedding that is longer than its micro batch.
_TOO_LONG: Final = re.compile(
    r"input \((\d{1,18}) tokens\) is too large to process.*size: (\d{1,18})"
)
# What an engine says of a prompt for a model that has no output for the next token, as a BERT.
_NO_TEXT: Final = "the current context does not logits computation"
_GENERATES_NOTHING: Final = (
    "this model is for embeddings or ranks and generates no text; "
    "use /v1/embeddings or /v1/rerank, or name another model"
)


def reclassify_error(status: int, body: bytes) -> tuple[int, bytes]:
    """Return the status and the body of an error, with 400 for a client's mistake.

    A feature that a model or its engine lacks (501) is one too: a retry changes nothing.

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
        return 400, orjson.dumps({"error": _context_size_error(*map(int, found.groups()))})
    if is_encoder := message.startswith(_NO_TEXT):
        error = {**error, "message": _GENERATES_NOTHING}
    if is_encoder or _CLIENT_MISTAKES.match(message):
        mistake = {**error, "code": 400, "type": "invalid_request_error"}
        return 400, orjson.dumps({"error": mistake})
    return status, body


def _context_size_error(tokens: int, limit: int) -> dict[str, Any]:
    """As for any other prompt that is longer than the context."""
    return {
        "code": 400,
        "message": f"the input is too large: {tokens} tokens, and this model takes {limit}",
        "type": "exceed_context_size_error",
        "n_prompt_tokens": tokens,
        "n_ctx": limit,
    }


def shortened(status: int, beginning: bytes) -> bytes | None:
    """Return an error whose body is too long to read, with the beginning of its message.

    The engine quotes what it cannot read, such as the arguments of a tool call, with all of its
    megabytes. None if no message begins there.

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


def client_error_body(kind: EndpointKind, path: str, status: int, body: bytes) -> bytes:
    """Return the body of an error as the client gets it."""
    error = parse_error(body) or _unexplained(status, body)
    if path.startswith("/v1/messages"):
        kept = {name: value for name, value in error.items() if name not in {"code", "param"}}
        named = {**kept, **_anthropic_message(error), "type": anthropic_type(status)}
        return orjson.dumps({"type": "error", "error": named})
    if kind in _OPENAI or path.endswith("/input_tokens"):
        return orjson.dumps({"error": {"param": None, **error, "code": error_code(error)}})
    return body if parse_error(body) else orjson.dumps({"error": error})


def error_code(error: Mapping[str, Any]) -> str:
    """Return the name of an instance's own error, for programs.

    llama-server names it by `type` and has the status as `code`; a node has both.
    """
    kind = str(error.get("type"))
    given = error.get("code")
    code = given if isinstance(given, str) else _CODES.get(kind, kind)
    return code if _NAME.fullmatch(code) else "upstream_error"


def status_of(error: Mapping[str, Any]) -> int:
    """Return the status of an error that came as an event: 400 to 599, 500 where it has none."""
    code = error.get("code")
    return code if isinstance(code, int) and 400 <= code < 600 else 500


def _anthropic_message(error: Mapping[str, Any]) -> Mapping[str, str]:
    """Return Anthropic's own message for a prompt that is too long.

    Claude Code compacts a conversation where it reads this sentence, and takes both figures from
    it. The engine also refuses a prompt that leaves no token for the answer.
    """
    match error:
        case {"type": "exceed_context_size_error", "n_prompt_tokens": int(n), "n_ctx": int(size)}:
            most = min(size, n - 1)
            return {"message": f"prompt is too long: {n} tokens > {most} maximum"}
    return {}


def _unexplained(status: int, body: bytes) -> dict[str, Any]:
    """Return an error in llama-server's own format for a body of another format, or none.

    cpp-httplib rejects what it cannot read with an empty body, and other servers say `detail`.
    """
    text = ascii(body[:_SHOWN_BYTES].decode(errors="replace"))[1:-1].strip()
    return {
        "code": status,
        "message": f"the instance refused the request with status {status}: {text or 'no reason'}",
        "type": openai_type(status),
    }


def parse_error(body: bytes) -> dict[str, Any] | None:
    try:
        members = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    error = members.get("error") if isinstance(members, dict) else None
    return error if isinstance(error, dict) else None


def is_model_missing(status: int, body: bytes) -> bool:
    """Return whether a node cannot serve its model: it is unloaded, or not there any more."""
    code = (parse_error(body) or {}).get("code")
    return status == 503 or (status == 404 and code == UnknownModel.code)


def is_loading(status: int, body: bytes) -> bool:
    """Return whether an instance reports that its model is not loaded yet."""
    error = parse_error(body) or {}
    return status == 503 and error.get("type") == "unavailable_error"
