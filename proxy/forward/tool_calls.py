"""Broken tool calls: repaired, or generated again, before a client gets them.

A call is checked when its last piece has arrived: its tool is one of the request, and its arguments
are a JSON object that the tool's own schema allows. Text passes at once; of a call, nothing passes
before it is checked. Text outside of calls is never read as a call.

A broken call is repaired if that is safe (`request/tools.py`). Otherwise the call alone is
generated again: the same conversation, whose prompt is in the slot's cache, with a JSON schema that
allows nothing but calls of that tool. llama-server has no grammar for a call without text before
it, and knows no tools together with a schema, so the schema describes the call as a model writes
it. If the engine could not parse an answer, its tool may be unknown; then the schema allows each
tool, and a text if the model may answer with one.

Source: llama-server, build 10434: arguments that `max_tokens` cuts are passed on, in the Responses
API without a word of the cut; an answer that its parser does not understand is an error in place of
the answer, or at the end of its stream.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import Any, Final
from uuid import uuid4

import orjson
from multidict import CIMultiDict

from proxy.errors import UpstreamFailed
from proxy.forward.assemblers import ToolCall
from proxy.forward.openai_responses import DELTAS, PART_DONE, part_of
from proxy.forward.response import Discarded, EventTransform, Response
from proxy.http.api_formats import Event, data_event, event_bytes, parse_error
from proxy.request.request import ProxyRequest
from proxy.request.tools import Tools
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.http1 import Splitter, data_of, members_of

_UNPARSED: Final = re.compile(
    r"The model produced output that does not match|got exception: Unexpected empty grammar"
)
# Limit of a call that is generated again, if the client sets none.
_CALL_MAX_TOKENS: Final = 8192
_LIMITS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict")
_OMITTED: Final = frozenset({"stream_options", "json_schema", "grammar", "return_progress", "stop"})
# A model that repeats a broken call exactly gets a chance to write another one.
_OTHER_TEMPERATURE: Final = 0.8


class Call:
    """A call as the client gets it.

    Attributes:
        fault: The fault; empty if none is known.
        text: The model's answer in place of a call, or None.
    """

    def __init__(self, name: str, arguments: str = "", call_id: str = "", fault: str = "") -> None:
        self.name = name
        self.arguments = arguments
        self.id = call_id
        self.fault = fault
        self.is_changed = False
        self.text: str | None = None


class CheckedCalls(EventTransform):
    """Holds the calls of one response until they are checked.

    If a call is broken, the response is held from there on, and its end is left out (`broken`).
    Then the caller generates calls again (`request_for`, `take`) and sends the `rest`.
    """

    is_delayed = True

    def __init__(self, request: ProxyRequest) -> None:
        super().__init__()
        self.tools = Tools(request.json)
        self.calls: list[Call] = []
        self.regenerated = 0
        self._request = request
        self._is_message = request.kind is EndpointKind.CHAT
        self._open: tuple[Call, ToolCall] | None = None
        # Events, their members, and the call that they are a piece of.
        self._held: list[tuple[bytes, Mapping[str, Any] | None, Call | None]] = []
        self._fed = b""  # the last result of `feed`; it is lost if `end` discards the end
        self._body: dict[str, Any] | None = None  # of a whole response that is held
        self._last: Mapping[str, Any] = {}  # the last piece of a stream
        self.is_stream = self._is_unparsed = self._is_unnamed = False
        # Tokens of all calls that were generated again, and of the one whose body is `_body`.
        self._again_tokens = self._own_tokens = 0
        # Items of the Responses API: calls that have ended, and texts by id, with their kind.
        self._ended = 0
        self._texts: dict[str, tuple[str, list[str]]] = {}

    @property
    def broken(self) -> Sequence[Call]:
        return [call for call in self.calls if call.fault]

    @property
    def mended(self) -> int:
        return sum(call.is_changed for call in self.calls) - self.regenerated

    def begin(self, status: int, headers: CIMultiDict[str]) -> None:  # noqa: ARG002 (of any status)
        """Forget the bytes of another instance that broke off before any of them went out."""
        self.calls, self._held, self._open = [], [], None
        self._splitter = Splitter()

    def feed(self, chunk: bytes) -> bytes:
        self._fed = super().feed(chunk)
        return self._fed

    def event(self, event: bytes) -> bytes:
        self.is_stream = True
        piece = members_of(event)
        call: Call | None = None
        if piece is not None and "error" in piece:
            self._note_failure(_message_of(data_of(event)))
        elif piece is not None:
            self._last = piece
            call = self._read(piece)
        self._held.append((event, piece, call))
        return b"" if self._open or self.broken else self._written()

    def end(self) -> bytes:
        if self.broken:
            raise Discarded
        return self._written() + self._splitter.take_rest()

    def whole(self, status: int, body: bytes) -> bytes:
        given = orjson.loads(body) if status == HTTPStatus.OK else {}
        is_cut = _is_cut(given)
        found = list(_calls_in(given))
        for at, written in enumerate(found):
            function = written.get("function") or written
            call = Call(function["name"], function["arguments"] or "", written.get("id") or "")
            self._mend(call, is_cut=is_cut and at == len(found) - 1)
            self.calls.append(call)
        self._body = given
        if self.broken:
            raise Discarded
        return orjson.dumps(self._substituted()) if self.mended else body

    def refuse(self, status: int, headers: CIMultiDict[str], body: bytes) -> bytes:  # noqa: ARG002
        """Hold the error of an engine that could not parse the model's answer."""
        self._note_failure(_message_of(body))
        if self.broken:
            raise Discarded
        return body

    def request_for(self, call: Call, attempt: int) -> ProxyRequest:
        """Return the request that generates a broken call again; its prompt is the same."""
        members, schemas = self._request.json, self.tools.schemas
        names = [call.name] if call.name in schemas else list(schemas)
        choices = [_call_schema(name, schemas[name]) for name in names]
        if not call.name and members.get("tool_choice") != "required":
            answer = {"type": "object", "properties": {"answer": {"type": "string"}}}
            choices.append({**answer, "required": ["answer"]})
        schema = choices[0] if len(choices) == 1 else {"anyOf": choices}
        if len(names) == 1 and b'"$ref"' in orjson.dumps(schemas[names[0]]):
            schema = schemas[names[0]]  # its references begin at its root
        described = {"type": "json_schema", "json_schema": {"name": "call", "schema": schema}}
        asked = {name: value for name, value in members.items() if name not in _OMITTED}
        asked |= {"stream": False, "response_format": described, "tool_choice": "none"}
        if not any(map(members.get, _LIMITS)):
            asked["max_tokens" if self._is_message else "max_output_tokens"] = _CALL_MAX_TOKENS
        if attempt:
            asked |= {"temperature": _OTHER_TEMPERATURE, "seed": attempt}
        return replace(
            self._request, json=asked, body=orjson.dumps(asked), is_let_in=True, call_retries=None
        )

    def take(self, call: Call, status: int, body: bytes) -> None:
        """Take the response to `request_for`; the call keeps a fault if it is broken again."""
        if status != HTTPStatus.OK:
            call.fault = _message_of(body)[:400]
            return
        try:
            answered = orjson.loads(body)
            tokens = _answer_tokens(answered)
            self._again_tokens += tokens
            written = orjson.loads(_text_of(answered))
        except orjson.JSONDecodeError:
            call.fault = "it was cut by the limit of tokens; raise it"
            return
        except (LookupError, TypeError, AttributeError) as error:
            raise UpstreamFailed(f"a tool call came in another format: {error!r}") from error
        match written:
            case {"name": str(name), "arguments": dict(arguments)} if name in self.tools.schemas:
                found = Call(name, orjson.dumps(arguments).decode())
            case {"answer": str(text)} if not call.name:
                call.text, call.fault, call.is_changed = text, "", True
                self._take_body(answered, tokens)
                return
            case _:
                found = Call(call.name, orjson.dumps(written).decode())
        self._mend(found, is_cut=False)
        call.fault = found.fault
        if not call.fault:
            call.name, call.arguments, call.is_changed = found.name, found.arguments, True
            call.id = call.id or uuid4().hex
            self.regenerated += 1
            self._take_body(answered, tokens)

    def _take_body(self, answered: dict[str, Any], tokens: int) -> None:
        """Take the first good response for the answer if the engine gave none."""
        if not self._body:
            self._body, self._own_tokens = answered, tokens

    def _whole_usage(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """Return a usage with the tokens of calls that were generated again; the prompt is one."""
        more = self._again_tokens - (self._own_tokens if self._is_unparsed else 0)
        names = ("completion_tokens", "output_tokens", "total_tokens")
        counts = {name: usage[name] + more for name in names if isinstance(usage.get(name), int)}
        return {**usage, **counts}

    def rest(self) -> bytes:
        """Return the bytes that the client has not got yet, once no call is broken."""
        if self.is_stream:
            return self._fed + self._written()
        return orjson.dumps(self._substituted())

    def _mend(self, call: Call, *, is_cut: bool) -> None:
        given = call.arguments
        call.arguments, call.fault = self.tools.mend(call.name, given, is_cut=is_cut)
        call.is_changed = call.arguments != given

    def _note_failure(self, message: str) -> None:
        """Note the error in place of a call that the engine could not parse."""
        is_callable = self.tools.schemas and self._request.json.get("tool_choice") != "none"
        if not _UNPARSED.search(message) or not is_callable:
            self._give_up()
            return
        self._is_unparsed = True
        if self._open is None:
            self._is_unnamed = True
            self.calls.append(Call("", fault=message))
        else:
            self._close(is_cut=True)
            self.calls[-1].fault = self.calls[-1].fault or message

    def _give_up(self) -> None:
        """Pass everything on as it is: the response failed for another reason."""
        self._open = None
        for call in self.calls:
            call.fault, call.is_changed = "", False

    def _read(self, piece: Mapping[str, Any]) -> Call | None:
        """Read a piece; return the call that it is a part of."""
        return self._read_chat(piece) if self._is_message else self._read_item(piece)

    def _read_chat(self, piece: Mapping[str, Any]) -> Call | None:
        for choice in piece.get("choices") or ():
            delta = choice.get("delta") or {}
            for written in delta.get("tool_calls") or ():
                if written.get("index", 0) != len(self.calls) - 1 or self._open is None:
                    self._close()
                    self._begin()
                return self._add(written)
            if delta.get("content") or choice.get("finish_reason"):
                self._close(is_cut=choice.get("finish_reason") == "length")
        return None

    def _read_item(self, event: Mapping[str, Any]) -> Call | None:
        match event:
            case {"type": "response.output_item.added", "item": {"type": "function_call", **item}}:
                self._close()
                self._begin()
                return self._add({"id": item.get("call_id"), "function": item})
            case {"type": "response.function_call_arguments.delta", "delta": str(delta)}:
                return self._add({"function": {"arguments": delta}}) if self._open else None
            case {"type": "response.output_item.done" | "response.completed"}:
                self._close(is_cut=True)  # maybe: the engine does not say so
            case {"type": str(kind), "item_id": str(item_id), "delta": str(delta)} if (
                kind in DELTAS
            ):
                self._texts.setdefault(item_id, (DELTAS[kind], []))[1].append(delta)
        return None

    def _begin(self) -> None:
        call = Call("")
        self.calls.append(call)
        self._open = call, ToolCall()

    def _add(self, delta: Mapping[str, Any]) -> Call | None:
        if self._open is None:
            return None
        call, written = self._open
        written.add(delta)
        return call

    def _close(self, *, is_cut: bool = False) -> None:
        """Check the open call, and keep only its first piece if it changes."""
        if self._open is None:
            return
        (call, written), self._open = self._open, None
        call.name, call.id = written.name, written.id
        call.arguments = written.arguments.decode()
        self._mend(call, is_cut=is_cut)
        if call.fault or call.is_changed:
            first = next((at for at, held in enumerate(self._held) if held[2] is call), None)
            self._held = [
                held for at, held in enumerate(self._held) if held[2] is not call or at == first
            ]

    def _written(self) -> bytes:
        held, self._held = self._held, []
        events = [self._rewritten(*given) for given in held]
        return b"".join(events) + self._missing_end()

    def _rewritten(self, event: bytes, piece: Mapping[str, Any] | None, call: Call | None) -> bytes:
        if piece is None or not any(other.is_changed for other in self.calls):
            return event
        if "error" in piece:
            return b""  # in place of the calls that were generated again
        if not self._is_message:
            return self._rewritten_item(piece)
        if usage := piece.get("usage"):
            piece = {**piece, "usage": self._whole_usage(usage)}
            event = data_event(piece)
        if call and call.is_changed:
            return data_event(_with_delta(piece, {"tool_calls": [self._call_json(call)]}))
        if self.regenerated and _is_cut(piece):
            return data_event(_with_delta(piece, {}, "tool_calls"))
        return event

    def _rewritten_item(self, event: Mapping[str, Any]) -> bytes:
        match event:
            case {"type": "response.output_item.done", "item": {"type": "function_call"} as item}:
                self._ended += 1
                call = self.calls[self._ended - 1]
                event = {**event, "item": {**item, "arguments": call.arguments}}
            case {"type": "response.completed", "response": dict(response)}:
                event = {**event, "response": self._substitute(response)}
        return event_bytes({**event}, 0)

    def _substituted(self) -> dict[str, Any]:
        """Return the whole response with the calls as the client gets them."""
        body = self._body or {}
        if not self._is_message:
            return self._substitute(body)
        (choice,) = body["choices"]
        message = {"role": "assistant", **choice["message"]}
        if texts := [call.text for call in self.calls if call.text is not None]:
            message["content"] = texts[0]
        elif self._is_unparsed:
            message["content"] = None
        if written := [self._call_json(call) for call in self.calls if call.text is None]:
            message["tool_calls"] = written
        is_named = written and (self._is_unparsed or self.regenerated)
        reason = "tool_calls" if is_named else choice.get("finish_reason")
        if usage := body.get("usage"):
            body = {**body, "usage": self._whole_usage(usage)}
        return {**body, "choices": [{**choice, "message": message, "finish_reason": reason}]}

    def _substitute(self, response: dict[str, Any]) -> dict[str, Any]:
        calls = iter(self.calls)
        output = [
            {**item, "arguments": next(calls).arguments}
            if item.get("type") == "function_call"
            else item
            for item in response["output"]
        ]
        if self._is_unparsed:
            reasoned = [item for item in output if item.get("type") == "reasoning"]
            output = [*reasoned, *map(_item_of, self.calls)]
        if usage := response.get("usage"):
            response = {**response, "usage": self._whole_usage(usage)}
        return {**response, "output": output}

    def _missing_end(self) -> bytes:
        """Return the end of a stream that ended in an error, with a call that had not begun."""
        if not (self._is_unparsed and self.is_stream) or self.broken:
            return b""
        if not self._is_message:
            return self._missing_items()
        body = {**(self._body or {}), **self._last}
        usage, last = body.pop("usage", None), self.calls[-1]
        pieces = []
        if last.text is not None:
            pieces.append(_with_delta(body, {"role": "assistant", "content": last.text}))
        elif last.is_changed and self._is_unnamed:
            calls = [self._call_json(last)]
            pieces.append(_with_delta(body, {"role": "assistant", "tool_calls": calls}))
        pieces.append(_with_delta(body, {}, "tool_calls" if last.text is None else "stop"))
        options = self._request.json.get("stream_options") or {}
        if options.get("include_usage") and usage:
            pieces.append({**_shared(body), "choices": [], "usage": self._whole_usage(usage)})
        return b"".join(map(data_event, pieces)) + b"data: [DONE]\n\n"

    def _missing_items(self) -> bytes:
        """Return the end of each item of a stream of the Responses API, and of the response."""
        items = [_text_item(item_id, *found) for item_id, found in self._texts.items()]
        items += map(_item_of, self.calls)
        response = {**(self._body or {}), "output": items}
        if usage := response.get("usage"):
            response["usage"] = self._whole_usage(usage)
        events: list[Event] = []
        for item in items:
            if item["type"] == "message":
                (part,) = item["content"]
                place = {"item_id": item["id"]}
                events += [
                    {"type": "response.output_text.done", **place, "text": part["text"]},
                    {"type": PART_DONE, **place, "part": part},
                ]
            events.append({"type": "response.output_item.done", "item": item})
        events.append({"type": "response.completed", "response": response})
        return b"".join(event_bytes(event, 0) for event in events)

    def _call_json(self, call: Call) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        written = {"id": call.id, "type": "function", "function": function}
        at = [other for other in self.calls if other.text is None].index(call)
        return {"index": at, **written} if self.is_stream else written


def _shared(piece: Mapping[str, Any]) -> dict[str, Any]:
    """Return the members that all pieces of a stream have."""
    names = ("id", "created", "model", "system_fingerprint")
    return {
        **{name: piece[name] for name in names if name in piece},
        "object": "chat.completion.chunk",
    }


def _with_delta(
    piece: Mapping[str, Any], delta: Mapping[str, Any], reason: str | None = None
) -> dict[str, Any]:
    """Return a piece of a chat with another delta; it keeps its role, timings and usage."""
    choices = piece.get("choices") or [{}]
    role = {"role": "assistant"} if (choices[0].get("delta") or {}).get("role") else {}
    kept = {name: piece[name] for name in ("timings", "usage") if reason and name in piece}
    choice = {"index": 0, "finish_reason": reason, "delta": {**role, **delta}}
    return {**_shared(piece), "choices": [choice], **kept}


def _item_of(call: Call) -> dict[str, Any]:
    """Return the item of the Responses API that a client gets for a call."""
    if call.text is not None:
        return _text_item(f"msg_{uuid4().hex}", "message", [call.text])
    called = {"name": call.name, "arguments": call.arguments}
    return {"type": "function_call", "call_id": call.id, **called, "status": "completed"}


def _text_item(item_id: str, kind: str, texts: Sequence[str]) -> dict[str, Any]:
    is_message = kind == "message"
    part = {"type": "output_text" if is_message else "reasoning_text", "text": "".join(texts)}
    found = {"type": kind, "id": item_id, "status": "completed"}
    if is_message:
        return {**found, "role": "assistant", "content": [part_of(part)]}
    return {**found, "summary": [], "content": [part]}


def _calls_in(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the calls of a whole response, as its API writes them."""
    for item in body.get("output") or ():
        if item.get("type") == "function_call":
            yield item
    for choice in body.get("choices") or ():
        yield from choice["message"].get("tool_calls") or ()


def _is_cut(body: Mapping[str, Any]) -> bool:
    """Whether a limit may have cut the answer; the Responses API of the engine never says so."""
    choices = body.get("choices") or ()
    return not choices or choices[0].get("finish_reason") == "length"


def _message_of(body: bytes) -> str:
    """Return the message of an error; in Ollama's API it is the error itself."""
    error = parse_error(body)
    return str(error.get("message")) if error else body.decode(errors="replace")


def _text_of(body: Mapping[str, Any]) -> str:
    texts = [choice["message"].get("content") or "" for choice in body.get("choices") or ()]
    for item in body.get("output") or ():
        if item.get("type") == "message":
            texts += [part.get("text") or "" for part in item["content"]]
    return "".join(texts)


def _answer_tokens(body: Mapping[str, Any]) -> int:
    usage = body.get("usage") or {}
    return int(usage.get("completion_tokens") or usage.get("output_tokens") or 0)


def _call_schema(name: str, schema: Any) -> dict[str, Any]:
    """Return the schema of a call as models write it."""
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": schema or {"type": "object"}},
        "required": ["name", "arguments"],
    }


class HistoryRefused(Exception):
    """The engine refused `count` calls of earlier turns; `request` has them repaired."""

    def __init__(self, request: ProxyRequest, count: int) -> None:
        super().__init__(count)
        self.request = request
        self.count = count


class Gathered(Response):
    """The whole response to a request that generates a call again, for this proxy alone."""

    def __init__(self, answer: Response) -> None:
        super().__init__(answer.record.part(), answer.api)
        self.body = b""
        self._answer = answer

    @property
    def status(self) -> int:
        return self._status

    @property
    def has_begun(self) -> bool:
        return self._answer.has_begun

    async def _send_header(self, status: int, headers: CIMultiDict[str]) -> None:  # noqa: ARG002
        self._status = status
        self.is_committed = True

    async def _send(self, chunk: bytes) -> None:
        self.body += chunk
