"""Goes on with a chat whose stream broke off because what is on trial crashed.

Another instance gets the chat with the text so far as the assistant's last message, which an engine
continues, and the client gets the rest in the same stream. Only where the stream so far is plain
text: a grammar or a tool call would start over.

Source: llama-server, build 10434: the first event with text has the continued message in front.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import orjson
from multidict import CIMultiDict

from proxy.endpoints import EndpointKind
from proxy.errors import UpstreamFailed
from proxy.forward.client_response import ResponseWriter
from proxy.forward.passed_response import PassedResponse
from proxy.request import ProxyRequest
from proxy.upstream.sse import InvalidEvent, Splitter, members_of, objects_of

_SENT_MAX_BYTES: Final = 1024**2
_PLAIN: Final = frozenset({"role", "content"})
_BEGIN_ANEW: Final = frozenset(
    (
        "continue_final_message",
        "functions",
        "grammar",
        "json_schema",
        "logprobs",
        "n_probs",
        "response_format",
        "return_tokens",
        "tools",
    )
)
_LIMITS: Final = ("max_tokens", "max_completion_tokens", "n_predict")


class SentResponse(PassedResponse[ResponseWriter]):
    """Passes a response on, and keeps what was sent of it."""

    def __init__(self, writer: ResponseWriter) -> None:
        super().__init__(writer)
        self._sent = bytearray()

    @property
    def sent(self) -> bytes | None:
        """None where it is too long to be kept."""
        return bytes(self._sent) if len(self._sent) <= _SENT_MAX_BYTES else None

    async def write(self, chunk: bytes) -> None:
        self._keep(chunk)
        await self._writer.write(chunk)

    def put(self, chunk: bytes) -> bool:
        is_put = self._writer.put(chunk)
        if is_put:
            self._keep(chunk)
        return is_put

    async def finish(self, last: bytes = b"") -> None:
        await self._writer.finish(last)

    def _keep(self, chunk: bytes) -> None:
        if len(self._sent) <= _SENT_MAX_BYTES:
            self._sent += chunk


@dataclass(frozen=True, slots=True)
class Continuation:
    """What is asked for the rest.

    Attributes:
        text: That the client has.
        tokens: Events of text that it has, of a token each.
        id: Of the completion, as the client knows it.
    """

    request: ProxyRequest
    text: str
    tokens: int
    id: object


def continuation(request: ProxyRequest, sent: bytes | None) -> Continuation | None:
    """Return what is asked for the rest of a stream; None where it cannot be continued."""
    members = request.json
    is_plain = request.kind is EndpointKind.CHAT and request.is_stream and request.slots == 1
    messages = members.get("messages")
    if sent is None or not is_plain or _BEGIN_ANEW & members.keys():
        return None
    if not isinstance(messages, list) or _is_assistant(messages[-1:]):
        return None
    events = _events(sent)
    if events is None or not all(map(_is_plain, events)):
        return None
    texts = [text for event in events if (text := _text(event))]
    limits = {name: members[name] - len(texts) for name in _LIMITS if _is_limit(members.get(name))}
    if any(rest <= 0 for rest in limits.values()):
        return None
    text = "".join(texts)
    said = [{"role": "assistant", "content": text}] if text else []
    rest = {**members, **limits, "messages": [*messages, *said]}
    asked = replace(request, json=rest, body=orjson.dumps(rest))
    return Continuation(asked, text, len(texts), events[0].get("id") if events else None)


def _events(sent: bytes) -> list[Mapping[str, Any]] | None:
    """Return the events that were sent; None where the last one is not whole."""
    splitter = Splitter()
    try:
        events = objects_of(splitter.feed(sent))
    except InvalidEvent:
        return None
    return None if splitter.rest() else events


def _is_plain(event: Mapping[str, Any]) -> bool:
    choices = event.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or "error" in event:
        return False
    delta = choices[0].get("delta")
    return isinstance(delta, dict) and delta.keys() <= _PLAIN and not choices[0]["finish_reason"]


def _text(event: Mapping[str, Any]) -> str:
    return str(event["choices"][0]["delta"].get("content") or "")


def _is_limit(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_assistant(last: list[object]) -> bool:
    return not last or (isinstance(last[0], dict) and last[0].get("role") == "assistant")


class ContinuedResponse(SentResponse):
    """Sends the rest of a stream: without its beginning, under the first one's id."""

    def __init__(self, writer: ResponseWriter, rest: Continuation) -> None:
        super().__init__(writer)
        self._rest = rest
        self._splitter = Splitter()
        self._is_begun = False

    async def begin(self, status: int, headers: CIMultiDict[str]) -> None:
        """Nothing: the client has the header."""

    async def write(self, chunk: bytes) -> None:
        if events := self._continued(self._splitter.feed(chunk)):
            await self._writer.write(events)

    def put(self, chunk: bytes) -> bool:  # noqa: ARG002 (left to `write`)
        return False

    async def finish(self, last: bytes = b"") -> None:
        events = self._continued(self._splitter.feed(last))
        await self._writer.finish(events + self._splitter.rest())

    async def refuse(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:  # noqa: ARG002
        raise UpstreamFailed(f"{self.record.instance} could not continue the answer: {status}")

    def _continued(self, events: Iterable[bytes]) -> bytes:
        return b"".join(map(self._event, events))

    def _event(self, event: bytes) -> bytes:
        members = members_of(event)
        if members is None:
            return event
        changed = {**members, "id": self._rest.id or members.get("id")}
        if isinstance(usage := members.get("usage"), dict):
            changed["usage"] = self._whole_usage(usage)
        if members.get("choices"):
            choice = members["choices"][0]
            delta = dict(choice.get("delta") or {})
            if not self._is_begun and not delta.get("content") and not choice["finish_reason"]:
                return b""  # the client knows the role
            if not self._is_begun:
                self._is_begun = True
                delta["content"] = (delta.get("content") or "").removeprefix(self._rest.text)
            changed["choices"] = [{**choice, "delta": delta}]
        return b"data: " + orjson.dumps(changed) + b"\n\n"

    def _whole_usage(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        before = {"completion_tokens": self._rest.tokens, "prompt_tokens": -self._rest.tokens}
        counts = {
            name: usage[name] + more
            for name, more in before.items()
            if isinstance(usage.get(name), int)
        }
        return {**usage, **counts}
