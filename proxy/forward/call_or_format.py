"""A request with tools and a format: a call is free of the format, any other answer has it.

llama-server knows one or the other: with a format it permits no call, whatever `tool_choice` says.
So the format is left out where a call is required. Where the model may choose, it is asked without
the format first, and its response is held back. If a call begins, that is the answer. If not, the
answer is requested once more, with the format and without the choice: its prompt is in the cache.
The first response is left as soon as its text begins as JSON, so that a model that answers in JSON
by itself generates a few tokens twice, and not its whole answer.

Source: llama-server, build 10434, common/chat.cpp and common/chat-auto-parser-generator.cpp: a
parser with a format has no tools; measured for each `tool_choice`, whole and as a stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import orjson
from multidict import CIMultiDict

from proxy.endpoints import EndpointKind
from proxy.forward.client_response import ResponseWriter
from proxy.forward.passed_response import PassedResponse
from proxy.headers import is_event_stream
from proxy.request import ProxyRequest
from proxy.router.lease import Lease
from proxy.upstream.sse import InvalidEvent, Splitter, objects_of

_KINDS: Final = frozenset({EndpointKind.CHAT, EndpointKind.RESPONSES})
_FORMATS: Final = frozenset({"response_format", "json_schema"})
_HELD_MAX_BYTES: Final = 4 * 1024**2
# No text before a call begins like this.
_JSON_BEGINS: Final = ("{", "[", "```")
_JSON_BEGIN_MAX: Final = 3


class AnswerBegan(Exception):
    """The response is no call, so the rest of it is not needed."""


def requires_call(request: ProxyRequest) -> bool:
    return request.json.get("tool_choice") == "required"


def call_request(request: ProxyRequest) -> ProxyRequest | None:
    """Return the request without its format; None unless it has tools to call and a format."""
    members = request.json
    may_call = bool(members.get("tools")) and members.get("tool_choice") != "none"
    if request.kind not in _KINDS or not may_call or not _has_format(members):
        return None
    return _with(request, {name: members[name] for name in members if name not in _FORMATS})


def answer_request(request: ProxyRequest) -> ProxyRequest:
    """Return the request for an answer that has the format; its prompt is the same."""
    answer = _with(request, {**request.json, "tool_choice": "none"})
    return replace(answer, is_let_in=True)


def _with(request: ProxyRequest, members: Mapping[str, Any]) -> ProxyRequest:
    return replace(request, json=members, body=orjson.dumps(members))


def _has_format(members: Mapping[str, Any]) -> bool:
    match members.get("response_format"):
        case {"type": "json_schema" | "json_object"}:
            return True
    return members.get("json_schema") is not None


class HeldResponse(PassedResponse[ResponseWriter]):
    """Holds a response back until a call begins in it; one without a call is left out.

    Attributes:
        is_call: Whether the client gets it.
    """

    def __init__(self, writer: ResponseWriter, request: ProxyRequest) -> None:
        super().__init__(writer)
        self.is_call = False
        self._is_single = request.slots == 1
        self._begin()

    def _begin(self) -> None:
        self._status, self._headers = 200, CIMultiDict[str]()
        self._held = bytearray()
        self._splitter = Splitter()
        self._text = ""

    def leased(self, lease: Lease) -> None:
        self._begin()  # an instance that broke off before is forgotten
        self._writer.leased(lease)

    async def begin(self, status: int, headers: CIMultiDict[str]) -> None:
        if self.is_call:
            await self._writer.begin(status, headers)
        self._status, self._headers = status, headers

    async def write(self, chunk: bytes) -> None:
        if not self.is_call:
            self._hold(chunk)
            chunk = await self._released()
        if chunk:
            await self._writer.write(chunk)

    def put(self, chunk: bytes) -> bool:
        return self.is_call and self._writer.put(chunk)

    async def finish(self, last: bytes = b"") -> None:
        if not self.is_call:
            self._hold(last)
            if not is_event_stream(self._headers):
                self.is_call = _has_call(_parsed(bytes(self._held)))
            last = await self._released()
        if self.is_call:
            await self._writer.finish(last)

    async def refuse(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        """Nothing before a call: the request for the answer is refused likewise, or answered."""
        if self.is_call:
            await self._writer.refuse(status, headers, body)

    def _hold(self, chunk: bytes) -> None:
        self._held += chunk
        if not is_event_stream(self._headers):
            return
        for piece in objects_of(self._splitter.feed(chunk)):
            if self.is_call or _begins_call(piece):
                self.is_call = True
                return
            if len(self._text) < _JSON_BEGIN_MAX:
                self._text = (self._text + _text_of(piece)).lstrip()
        is_json = self._is_single and self._text.startswith(_JSON_BEGINS)
        if is_json or len(self._held) > _HELD_MAX_BYTES:
            raise AnswerBegan

    async def _released(self) -> bytes:
        """Return what was held, once the response has begun for the client."""
        if not self.is_call:
            return b""
        await self._writer.begin(self._status, self._headers)
        return bytes(self._held)


def _begins_call(piece: Mapping[str, Any]) -> bool:
    match piece:
        case {"type": "response.output_item.added", "item": {"type": "function_call"}}:
            return True
    return any(delta.get("tool_calls") for delta in _parts(piece, "delta"))


def _text_of(piece: Mapping[str, Any]) -> str:
    match piece:
        case {"type": "response.output_text.delta", "delta": str(text)}:
            return text
    return "".join(str(delta.get("content") or "") for delta in _parts(piece, "delta"))


def _has_call(body: Mapping[str, Any]) -> bool:
    match body:
        case {"output": list(items)}:
            return any(
                isinstance(item, dict) and item.get("type") == "function_call" for item in items
            )
    return any(message.get("tool_calls") for message in _parts(body, "message"))


def _parts(body: Mapping[str, Any], name: str) -> Iterator[Mapping[str, Any]]:
    """Yield the part of this name of each choice of a chat."""
    choices = body.get("choices")
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict) and isinstance(part := choice.get(name), dict):
            yield part


def _parsed(body: bytes) -> Mapping[str, Any]:
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidEvent(f"the response is no JSON: {error}") from error
    return parsed if isinstance(parsed, dict) else {}
