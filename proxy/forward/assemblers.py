"""Reads whole responses from the pieces of a stream: one class for each API. Pure.

An assistant's message is in the format of OpenAI's chat API; its content may be a list of parts in
the format of the API in use. APIs without roles have no message. An engine sends the last piece of
a choice and then its timings; the whole response has the timings of choice 0. The last piece of
OpenAI's Responses API contains nearly the whole response. Anthropic's messages and whole responses
of the Responses API report tokens, no `timings`.

`CompletedResponse` and `EmbeddingUsage` read timings and message from the bytes that were passed
on. A response that is too long or of another format has neither; nothing waits for them and nothing
fails.

Source: llama-server, build 10434, both responses of each endpoint at temperature 0; `usage` with
`prompt_tokens` of embeddings and reranking, before or after the numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

import orjson

from proxy.errors import Unfinished
from proxy.router.lease import Completion
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.http1 import InvalidEvent, Splitter
from proxy.upstream.upstream import Timings


class ResponseReader:
    """Reads one response: the pieces of a stream (`add`), or a whole body (`take`).

    A piece or body of another kind raises InvalidEvent, LookupError, TypeError or AttributeError.
    """

    def add(self, piece: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def take(self, body: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def message(self) -> Mapping[str, Any] | None:
        return None

    def timings(self) -> Mapping[str, Any] | None:
        raise NotImplementedError

    def other_timings(self) -> Iterable[object]:
        """Return the timings of the further answers to the prompt."""
        return ()


class Assembler(ResponseReader):
    is_complete: bool = False  # whether the stream has ended

    @property
    def is_blank(self) -> bool:
        """Whether the response is empty or incomplete because a stream may omit parts of it."""
        raise NotImplementedError

    def partial_text(self) -> Unfinished | None:
        """Return the text of an incomplete response; None if the response has more than text."""
        return None

    def assemble(self) -> dict[str, Any]:
        """Return the whole response; raises InvalidEvent before it is complete."""
        if not self.is_complete:
            raise InvalidEvent("the stream ended before the answer was complete")
        return self._assemble()

    def _assemble(self) -> dict[str, Any]:
        raise NotImplementedError


class LlamaCompletionAssembler(Assembler):
    """A completion, with the ids of its tokens if they are requested.

    Each event has the token that it adds; the token of a progress event is meaningless. Source:
    llama-server, build 10434.
    """

    def __init__(self, *, has_tokens: bool = False) -> None:
        self._has_tokens = has_tokens
        self._text = bytearray()
        self._tokens: list[int] = []
        self._last: Mapping[str, Any] = {}

    @property
    def is_blank(self) -> bool:
        # A character may have several tokens; a stream has only the last of them.
        lacks_tokens = self._has_tokens and len(self._tokens) != self._last.get("tokens_predicted")
        return not self._text or lacks_tokens

    def add(self, piece: Mapping[str, Any]) -> None:
        self._text += piece["content"].encode()
        if self._has_tokens and "prompt_progress" not in piece:
            self._tokens += piece["tokens"]
        self._last, self.is_complete = piece, piece.get("stop") is True

    def timings(self) -> Mapping[str, Any] | None:
        return self._last.get("timings")

    def _assemble(self) -> dict[str, Any]:
        settings = {**self._last.get("generation_settings", {}), "stream": False}
        return {
            **self._last,
            "content": self._text.decode(),
            "tokens": self._tokens,
            "generation_settings": settings,
        }


class TimingsOnly(ResponseReader):
    def __init__(self) -> None:
        self._timings: dict[object, Mapping[str, Any]] = {}

    def timings(self) -> Mapping[str, Any] | None:
        return next(iter(self._timings.values()), None)

    def other_timings(self) -> Iterable[object]:
        return list(self._timings.values())[1:]

    def add(self, piece: Mapping[str, Any]) -> None:
        if timings := piece.get("timings"):
            choices = piece.get("choices")
            self._timings[(choices[0] if choices else piece).get("index")] = timings

    def take(self, body: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        for piece in [body] if isinstance(body, Mapping) else body:
            self.add(piece)


def token_timings(cached: int, computed: int, decoded: int) -> Mapping[str, int]:
    """Return `timings` for an API that reports only tokens."""
    return {"cache_n": cached, "prompt_n": computed, "predicted_n": decoded}


# Members that the whole answer does not take from the last piece of choice 0.
_OURS: Final = frozenset({"choices", "object", "prompt_progress", "usage", "timings"})
_CHOICES_MAX: Final = 1024
_NOTHING: Final[Mapping[str, Any]] = {}


@dataclass(slots=True)
class ToolCall:
    id: str = ""
    type: str = "function"
    name: str = ""
    arguments: bytearray = field(default_factory=bytearray)

    def add(self, delta: Mapping[str, Any]) -> None:
        function = delta.get("function") or {}
        self.id = delta.get("id") or self.id
        self.type = delta.get("type") or self.type
        self.name = function.get("name") or self.name
        self.arguments += (function.get("arguments") or "").encode()

    def to_json(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments.decode()}
        return {"type": self.type, "function": function, "id": self.id}


class _Choice:
    __slots__ = "calls", "content", "figures", "finish_reason", "last", "reasoning", "tokens"

    def __init__(self) -> None:
        self.content, self.reasoning = bytearray(), bytearray()
        self.calls: dict[int, ToolCall] = {}
        self.finish_reason: str | None = None
        self.last: Mapping[str, Any] = _NOTHING
        self.figures: dict[str, Any] = {}
        self.tokens = 0  # pieces with content

    def add_thought_and_calls(self, delta: Mapping[str, Any]) -> None:
        if text := delta.get("reasoning_content"):
            self.reasoning += text.encode()
        for call in delta.get("tool_calls") or ():
            self.calls.setdefault(call["index"], ToolCall()).add(call)

    @property
    def is_blank(self) -> bool:
        return not (self.calls or self.tokens or self.reasoning)

    def partial_text(self) -> Unfinished | None:
        if self.finish_reason or self.calls or self.reasoning:
            return None
        return Unfinished(self.content.decode(), self.tokens, self.last.get("id"))

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content.decode()}
        if reasoning := self.reasoning.decode():
            message["reasoning_content"] = reasoning
        if self.calls:
            message["tool_calls"] = [self.calls[at].to_json() for at in sorted(self.calls)]
        return message


class ChatAssembler(Assembler):
    def __init__(self, *, is_chat: bool) -> None:
        self._is_chat = is_chat
        self._choices: dict[int, _Choice] = {}
        self._latest = _Choice()  # the first one, once there is any
        self._body: Mapping[str, Any] = _NOTHING

    @property
    def is_blank(self) -> bool:
        return any(choice.is_blank for choice in self._choices.values())

    def add(self, piece: Mapping[str, Any]) -> None:
        for part in piece["choices"]:
            choice = self._choices.get(part["index"]) or self._begin(part["index"])
            self._latest, choice.last = choice, piece
            delta = part.get("delta") or _NOTHING
            if text := delta.get("content") or part.get("text"):
                choice.content += text.encode()
                choice.tokens += 1
            if len(delta) > 1 or not text:  # most pieces have nothing but content
                choice.add_thought_and_calls(delta)
            if finish_reason := part.get("finish_reason"):
                choice.finish_reason = finish_reason
                self.is_complete = all(other.finish_reason for other in self._choices.values())
        if "usage" in piece:
            self._latest.figures["usage"] = piece["usage"]
        if "timings" in piece:
            self._latest.figures["timings"] = piece["timings"]

    def add_text(self, name: str, text: str, tokens: int) -> None:
        """Add the text of further events like the latest one; `name` is its member."""
        choice = self._latest
        if name == "content":
            choice.content += text.encode()
            choice.tokens += tokens
        else:
            choice.reasoning += text.encode()

    def _begin(self, index: int) -> _Choice:
        if len(self._choices) >= _CHOICES_MAX:
            raise InvalidEvent(f"it has more than {_CHOICES_MAX} choices")
        choice = self._choices[index] = _Choice() if self._choices else self._latest
        self.is_complete = False
        return choice

    def partial_text(self) -> Unfinished | None:
        """Return the text of a stream that broke off; None if it has more than text."""
        return self._first().partial_text() if len(self._choices) <= 1 else None

    def take(self, body: Mapping[str, Any]) -> None:
        self._body = body

    def message(self) -> Mapping[str, Any] | None:
        """Return the message of the first choice, as a client repeats it in its next request."""
        if self._body:
            message: Mapping[str, Any] = self._body["choices"][0]["message"]
            return message
        return self._first().message() if self._is_chat and self.is_complete else None

    def timings(self) -> Mapping[str, Any] | None:
        return self._body.get("timings") or self._first().figures.get("timings")

    def other_timings(self) -> Iterable[object]:
        if len(self._choices) < 2:
            return ()
        others = (choice for index, choice in self._choices.items() if index)
        return [choice.figures.get("timings") for choice in others]

    def _assemble(self) -> dict[str, Any]:
        first = self._first()
        shared = {name: value for name, value in first.last.items() if name not in _OURS}
        return {
            "choices": [self._choice_json(index) for index in sorted(self._choices)],
            **shared,
            "object": "chat.completion" if self._is_chat else "text_completion",
            **first.figures,
        }

    def _first(self) -> _Choice:
        return self._choices.get(0) or _Choice()

    def _choice_json(self, index: int) -> dict[str, Any]:
        choice = self._choices[index]
        finished = {"index": index, "finish_reason": choice.finish_reason}
        if self._is_chat:
            return {**finished, "message": choice.message()}
        return {**finished, "text": choice.content.decode(), "logprobs": None}


# The member of a block that each kind of piece extends; a call's input arrives as parts of JSON.
_ADDS: Final = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}


@dataclass(slots=True)
class _Block:
    began: Mapping[str, Any]
    parts: dict[str, bytearray] = field(default_factory=dict)

    def add(self, delta: Mapping[str, Any]) -> None:
        name = _ADDS[delta["type"]]
        self.parts.setdefault(name, bytearray()).extend(delta[name].encode())

    def to_json(self) -> dict[str, Any]:
        """Return the block; a tool's input is empty if the call was cut."""
        added: dict[str, Any] = {name: text.decode() for name, text in self.parts.items()}
        text = added.pop("partial_json", None)
        if self.began.get("type") == "tool_use":
            try:
                added["input"] = orjson.loads(text) if text else self.began.get("input", {})
            except orjson.JSONDecodeError:
                added["input"] = {}
        return {**self.began, **added}


class MessagesAssembler(Assembler):
    def __init__(self) -> None:
        self._message: dict[str, Any] = {"usage": {}}
        self._blocks: dict[int, _Block] = {}

    @property
    def is_blank(self) -> bool:
        """Whether it has no text or no start.

        Source: llama-server, build 10434: if the first token is a part of a character, the stream
        omits `message_start`.
        """
        return "id" not in self._message or not any(block.parts for block in self._blocks.values())

    def add(self, piece: Mapping[str, Any]) -> None:
        match piece.get("type"):
            case "message_start":
                self._message = dict(piece["message"])
            case "content_block_start":
                self._blocks[piece["index"]] = _Block(piece["content_block"])
            case "content_block_delta":
                self._blocks[piece["index"]].add(piece["delta"])
            case "message_delta":
                usage = {**self._message["usage"], **piece["usage"]}
                self._message |= {**piece["delta"], "usage": usage}
            case "message_stop":
                self.is_complete = True

    def take(self, body: Mapping[str, Any]) -> None:
        self._message = dict(body)
        self._blocks = {at: _Block(block) for at, block in enumerate(body["content"])}

    def message(self) -> Mapping[str, Any] | None:
        return {"role": "assistant", "content": self._content} if self._blocks else None

    def timings(self) -> Mapping[str, Any] | None:
        if not (usage := self._message["usage"]):
            return None
        cached = usage.get("cache_read_input_tokens", 0)
        return token_timings(cached, usage.get("input_tokens", 0), usage.get("output_tokens", 0))

    def _assemble(self) -> dict[str, Any]:
        return {**self._message, "content": self._content}

    @property
    def _content(self) -> list[dict[str, Any]]:
        return [self._blocks[at].to_json() for at in sorted(self._blocks)]


class ResponsesAssembler(Assembler):
    def __init__(self) -> None:
        self._response: Mapping[str, Any] = {}
        self._timings: Mapping[str, Any] | None = None

    @property
    def is_blank(self) -> bool:
        return not self._response.get("output")

    def add(self, piece: Mapping[str, Any]) -> None:
        if piece.get("type") == "response.completed":
            self.take(piece["response"])
            self._timings = piece.get("timings")

    def take(self, body: Mapping[str, Any]) -> None:
        usage, self._response = body["usage"], body
        self.is_complete = bool(body)
        cached = usage.get("input_tokens_details", {}).get("cached_tokens", 0)
        self._timings = token_timings(
            cached, usage["input_tokens"] - cached, usage["output_tokens"]
        )

    def message(self) -> Mapping[str, Any] | None:
        parts: list[Mapping[str, Any]] = []
        for item in self._response.get("output", ()):
            parts += item["content"] if item.get("type") == "message" else [item]
        return {"role": "assistant", "content": parts} if parts else None

    def timings(self) -> Mapping[str, Any] | None:
        return self._timings

    def _assemble(self) -> dict[str, Any]:
        output = [{"status": "completed", **item} for item in self._response["output"]]
        created_at = self._response.get("created_at")
        return {"completed_at": created_at, **self._response, "output": output}


def chat_piece(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a whole chat completion of one choice as a single piece of a stream."""
    (choice,) = body["choices"]
    message = choice["message"]
    calls = [{**call, "index": at} for at, call in enumerate(message.get("tool_calls") or ())]
    return {**body, "choices": [{**choice, "delta": {**message, "tool_calls": calls}}]}


def assembler_for(kind: EndpointKind, members: Mapping[str, Any]) -> Assembler:
    match kind:
        case EndpointKind.MESSAGES:
            return MessagesAssembler()
        case EndpointKind.RESPONSES:
            return ResponsesAssembler()
        case EndpointKind.LLAMA_COMPLETION:
            return LlamaCompletionAssembler(has_tokens=members.get("return_tokens") is True)
        case _:
            return ChatAssembler(is_chat=kind is EndpointKind.CHAT)


_WITH_MESSAGES: Final = {EndpointKind.CHAT, EndpointKind.MESSAGES, EndpointKind.RESPONSES}


def reader_for(kind: EndpointKind) -> ResponseReader:
    return assembler_for(kind, {}) if kind in _WITH_MESSAGES else TimingsOnly()


_USAGE: Final = re.compile(rb'"usage":\s*\{[^{}]{0,256}?"prompt_tokens":\s*(\d{1,12})')
_USAGE_END_BYTES: Final = 1024


class EmbeddingUsage:
    """Reads the tokens of embeddings or ranks from the beginning or the end of a response."""

    def __init__(self) -> None:
        self._head = b""
        self._tail = b""

    def feed(self, chunk: bytes) -> None:
        if len(self._head) < _USAGE_END_BYTES:
            self._head += chunk[:_USAGE_END_BYTES]
        self._tail = (self._tail + chunk)[-_USAGE_END_BYTES:]

    def close(self, last: bytes) -> Completion:
        self.feed(last)
        found = _USAGE.search(self._head) or _USAGE.search(self._tail)
        return Completion(all_choices=Timings(0, int(found[1]), 0.0, 0, 0.0) if found else None)


# A few tokens: reading them together costs less, and each stream keeps little.
_BATCH_BYTES: Final = 4096
# An engine's event that adds only text. The next ones differ in the text, and once a second in the
# time after it.
_TEXT_EVENT: Final = re.compile(
    rb'(data: {"choices":\[{"finish_reason":null,"index":0,"delta":{"((?:reasoning_)?content)":")'
    rb'(?:[^"\\]|\\.)*("}}\],[^\n]*\n\n)'
)
_DATA: Final = b"data: "
_TOTAL_MAX_BYTES: Final = 4 * 1024**2


def completion_of(response: ResponseReader) -> Completion:
    """Return the message and timings of a complete response; raises as `ResponseReader` does."""
    timings = together = Timings.read(response.timings())
    if together:
        for other in filter(None, map(Timings.read, response.other_timings())):
            # One prompt is computed for all answers.
            answer = replace(other, cached_tokens=0, prompt_tokens=0, prompt_ms=0.0)
            together = answer.plus(together)
    return Completion(timings, response.message(), together)


class CompletedResponse:
    """Reads the message and timings of a response from the bytes that were passed on."""

    def __init__(self, kind: EndpointKind, *, is_stream: bool) -> None:
        self._is_stream = is_stream
        self._chunks: list[bytes] = []
        self._batch_bytes = self._total_bytes = 0
        self._batch_max = _BATCH_BYTES if is_stream else _TOTAL_MAX_BYTES
        self._splitter = Splitter()
        # None for a response that is too long or has another format
        self._reader: ResponseReader | None = reader_for(kind)
        # the latest event before its text, the member that has the text, and the rest
        self._latest: Sequence[bytes] = ()

    def feed(self, chunk: bytes) -> None:
        """Take bytes that were passed on; most calls only append them to a list."""
        self._chunks.append(chunk)
        self._batch_bytes += len(chunk)
        if self._batch_bytes > self._batch_max:
            self._read_batch()

    def close(self, last: bytes) -> Completion:
        self.feed(last)
        self._read_batch()
        if self._reader is None:
            return Completion()
        try:
            return completion_of(self._reader)
        except (LookupError, TypeError, AttributeError):
            return Completion()

    def partial_text(self) -> Unfinished | None:
        """Return the text of a chat whose stream broke off.

        None if it has more than plain text, is too long, or ends within an event.
        """
        self._read_batch()
        if isinstance(self._reader, ChatAssembler) and self._splitter.is_between:
            return self._reader.partial_text()
        return None

    def _read_batch(self) -> None:
        reader, chunks = self._reader, self._chunks
        if not chunks:
            return
        self._chunks = []
        self._total_bytes += self._batch_bytes
        self._batch_bytes = 0
        try:
            if reader is None or self._total_bytes > _TOTAL_MAX_BYTES:
                self._reader, self._batch_max = None, 0
            elif self._is_stream:
                self._read_events(reader, b"".join(chunks))
            else:
                reader.take(orjson.loads(b"".join(chunks)))
        except (InvalidEvent, ValueError, LookupError, TypeError, AttributeError):
            self._reader = None

    def _read_events(self, reader: ResponseReader, stream: bytes) -> None:
        if isinstance(reader, ChatAssembler):
            stream = stream[self._read_texts(reader, stream) :]
            if first := _TEXT_EVENT.search(stream):
                self._add_each(reader, stream[: first.end()])
                self._latest = first.groups()
                stream = stream[first.end() :]
                stream = stream[self._read_texts(reader, stream) :]
        if stream:
            self._add_each(reader, stream)
            self._latest = ()

    def _add_each(self, reader: ResponseReader, stream: bytes) -> None:
        for piece in self._splitter.objects(stream):
            reader.add(piece)

    def _read_texts(self, reader: ChatAssembler, stream: bytes) -> int:
        """Add the texts of events that are else like the latest one; return their end.

        To parse each event takes ten times as long.
        """
        if self._latest and stream:
            before, name, after = self._latest
            end = stream.rfind(after) + len(after)
            events = stream[len(_DATA) : end - 2].split(b"\n\n" + _DATA)
            texts = [event[len(before) - len(_DATA) : 2 - len(after)] for event in events]
            if stream[:end] == before + (after + before).join(texts) + after:
                # Any other content of these events would end the string.
                with suppress(orjson.JSONDecodeError):
                    text = orjson.loads(b'"%b"' % b"".join(texts))
                    reader.add_text(name.decode(), text, len(texts) - texts.count(b""))
                    return end
        return 0
