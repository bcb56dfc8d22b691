"""How each API writes its errors and streams (`ApiFormat`). Pure.

llama-server's `code` is a number in every API. OpenAI's clients expect a string or null, with a
known string for a prompt that is too long; Anthropic's clients expect another format. Message, type
and figures of an engine's error are kept. Errors of llama-server's own endpoints are not changed.

Source: OpenAI's API reference, "Streaming events", `error`; Anthropic's streaming API, event
`ping`; WHATWG HTML, section "Authoring notes" of server-sent events, on comments as pings;
llama-server, build 10434; openai-python and anthropic-python, their exceptions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

import orjson
from aiohttp import web

from proxy.common.headers import EVENT_STREAM
from proxy.errors import ProxyError, anthropic_type, openai_type
from proxy.upstream.endpoint_kinds import ENDPOINTS, EndpointKind

Event = dict[str, Any]

LINES: Final = "application/x-ndjson"
_CODES: Final = {"exceed_context_size_error": "context_length_exceeded"}
_NAME: Final = re.compile(r"[a-z0-9_]{1,64}")
_SHOWN_BYTES: Final = 200


@dataclass(frozen=True, slots=True)
class ApiFormat:
    # Returns the body of an error of the proxy, before it is serialised.
    own_error: Callable[[ProxyError], dict[str, object]]
    # Returns the client's body for the status and the body of an engine's error.
    engine_error: Callable[[int, bytes], bytes]
    # Returns the last piece of a stream for the body of an error.
    error_event: Callable[[bytes], bytes] = lambda body: b"data: %b\n\n" % body
    ping: Callable[[], bytes] = lambda: b":\n\n"  # Returns a piece of a stream that clients skip.
    stream_type: str = EVENT_STREAM  # The media type of a stream.
    piece_end: bytes = b"\n\n"  # The end of each piece of a stream.


def _openai_own(error: ProxyError) -> dict[str, object]:
    return {
        "error": {
            "message": error.message,
            "type": openai_type(error.status),
            "param": error.param,
            "code": error.code,
        }
    }


def _anthropic_own(error: ProxyError) -> dict[str, object]:
    details = {"type": anthropic_type(error.status), "message": error.message}
    return {"type": "error", "error": details}


def _openai_engine(status: int, body: bytes) -> bytes:
    error = parse_error(body) or _unknown_error(status, body)
    return orjson.dumps({"error": {"param": None, **error, "code": error_code(error)}})


def _anthropic_engine(status: int, body: bytes) -> bytes:
    error = parse_error(body) or _unknown_error(status, body)
    kept = {name: value for name, value in error.items() if name not in {"code", "param"}}
    named = {**kept, **_anthropic_message(error), "type": anthropic_type(status)}
    return orjson.dumps({"type": "error", "error": named})


def _anthropic_message(error: Mapping[str, Any]) -> Mapping[str, str]:
    """Return Anthropic's own message for a prompt that is too long.

    Claude Code compacts a conversation when it reads this sentence, and takes both figures from it.
    The engine also refuses a prompt that leaves no token for the answer.
    """
    match error:
        case {"type": "exceed_context_size_error", "n_prompt_tokens": int(n), "n_ctx": int(size)}:
            most = min(size, n - 1)
            return {"message": f"prompt is too long: {n} tokens > {most} maximum"}
    return {}


def _llama_engine(status: int, body: bytes) -> bytes:
    return body if parse_error(body) else orjson.dumps({"error": _unknown_error(status, body)})


def _ollama_engine(status: int, body: bytes) -> bytes:
    return ollama_error(parse_error(body) or _unknown_error(status, body))


def ollama_error(error: Mapping[str, Any]) -> bytes:
    """Return an error of an engine as a line of Ollama's API."""
    message = {"error": str(error.get("message"))}
    return orjson.dumps(message, option=orjson.OPT_APPEND_NEWLINE)


def _error_event(body: bytes) -> bytes:
    return b"event: error\ndata: %b\n\n" % body


OPENAI: Final = ApiFormat(_openai_own, _openai_engine)
RESPONSES: Final = replace(
    OPENAI, error_event=lambda body: event_bytes(error_as_event(orjson.loads(body)), 0)
)
ANTHROPIC: Final = ApiFormat(
    _anthropic_own,
    _anthropic_engine,
    _error_event,
    ping=lambda: b'event: ping\ndata: {"type": "ping"}\n\n',
)
OLLAMA: Final = ApiFormat(
    lambda error: {"error": error.message},
    _ollama_engine,
    error_event=lambda body: body.rstrip(b"\n") + b"\n",
    stream_type=LINES,
    piece_end=b"\n",
)
LLAMA_SERVER: Final = ApiFormat(_openai_own, _llama_engine)

_LLAMA_KINDS: Final = frozenset(
    {EndpointKind.LLAMA_COMPLETION, EndpointKind.INFILL, EndpointKind.INFO, EndpointKind.PROMPT}
)
_BY_PATH: Final[Mapping[str, ApiFormat]] = {
    **{
        path: LLAMA_SERVER
        for endpoints in ENDPOINTS.values()
        for path, kind in endpoints.items()
        if kind in _LLAMA_KINDS and not path.endswith("/input_tokens")
    },
    "/generate": LLAMA_SERVER,
    "/stream/generate": replace(LLAMA_SERVER, error_event=_error_event),
    "/responses": RESPONSES,
    "/v1/responses": RESPONSES,
}


@lru_cache(maxsize=64)
def format_of(path: str) -> ApiFormat:
    """Return the format of the API that a path belongs to; OpenAI's if it belongs to no other."""
    if path.startswith("/v1/messages"):
        return ANTHROPIC
    return OLLAMA if path.startswith("/api/") else _BY_PATH.get(path, OPENAI)


def error_response(path: str, error: ProxyError) -> web.Response:
    response = web.Response(
        status=error.status,
        headers=error.headers(),
        body=orjson.dumps(format_of(path).own_error(error)),
        content_type="application/json",
    )
    if error.ends_connection:
        response.force_close()
    return response


def data_event(members: Mapping[str, Any]) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(members)


def named_event(name: str, members: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(members))


def event_bytes(event: Event, number: int) -> bytes:
    """Return an event of the Responses API."""
    event["sequence_number"] = number
    return named_event(event["type"], event)


def error_as_event(body: Mapping[str, Any]) -> Event:
    """Return the Responses API's event for an error's body.

    Libraries of other APIs read its member `error`.
    """
    given = body.get("error") or body
    error = given if isinstance(given, dict) else {"message": str(given)}
    code, kind = error.get("code"), error.get("type")
    shown = {"param": None, **error, "code": code if isinstance(code, str) else str(kind)}
    own = {name: shown.get(name) for name in ("code", "message", "param")}
    return {"type": "error", **own, "error": shown}


def parse_error(body: bytes) -> dict[str, Any] | None:
    """Return the member `error` of an engine's error; None if the body has another format."""
    try:
        members = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    error = members.get("error") if isinstance(members, dict) else None
    return error if isinstance(error, dict) else None


def error_code(error: Mapping[str, Any]) -> str:
    """Return the name of an instance's own error, for programs.

    llama-server's `type` is the name and its `code` the status; a node's `code` is the name.
    """
    kind = str(error.get("type"))
    given = error.get("code")
    code = given if isinstance(given, str) else _CODES.get(kind, kind)
    return code if _NAME.fullmatch(code) else "upstream_error"


def _unknown_error(status: int, body: bytes) -> dict[str, Any]:
    """Return an error in llama-server's own format, for a body that is empty or not in it.

    cpp-httplib rejects requests that it cannot read with an empty body; other servers send
    `detail`.
    """
    text = ascii(body[:_SHOWN_BYTES].decode(errors="replace"))[1:-1].strip()
    return {
        "code": status,
        "message": f"the instance refused the request with status {status}: {text or 'no reason'}",
        "type": openai_type(status),
    }
