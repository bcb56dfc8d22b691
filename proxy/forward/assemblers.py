"""Whole responses out of the pieces of a stream: one class for each API. Pure.

An assistant's message is in the format of OpenAI's chat API; its content may be a list of parts in
the format of the API at hand. APIs without roles have no message. An engine sends the last piece of
a choice and its timings one after the other; the whole response has those of choice 0. The last
piece of OpenAI's Responses API holds nearly all of it. Anthropic's messages and whole responses of
the Responses API report tokens, no `timings`.

Source: llama-server, build 10434, both responses of each endpoint at temperature 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import orjson

from proxy.errors import Unfinished
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.sse import InvalidEvent


class LlamaCompletionAssembler:
    """A completion, with the ids of its tokens where they are requested.

    Each event has the token that it adds; that of progress means nothing. Source: llama-server,
    build 10434.
    """

    def __init__(self, *, has_tokens: bool = False) -> None:
        self._has_tokens = has_tokens
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._last: Mapping[str, Any] = {}

    @property
    def is_complete(self) -> bool:
        return self._last.get("stop") is True

    @property
    def is_blank(self) -> bool:
        return not any(self._texts) or self._lacks_tokens

    def add(self, piece: Mapping[str, Any]) -> None:
        self._texts.append(piece["content"])
        if self._has_tokens and "prompt_progress" not in piece:
            self._tokens += piece["tokens"]
        self._last = piece

    def message(self) -> Mapping[str, Any] | None:
        return None

    def timings(self) -> Mapping[str, Any] | None:
        return self._last.get("timings")

    def other_timings(self) -> Iterable[object]:
        return ()

    def whole(self) -> dict[str, Any]:
        if not self.is_complete:
            raise InvalidEvent("the stream ended before the answer was complete")
        settings = {**self._last.get("generation_settings", {}), "stream": False}
        return {
            **self._last,
            "content": "".join(self._texts),
            "tokens": self._tokens,
            "generation_settings": settings,
        }

    @property
    def _lacks_tokens(self) -> bool:
        """Whether a letter has several tokens: a stream has only the last of them."""
        return self._has_tokens and len(self._tokens) != self._last.get("tokens_predicted")


class TimingsOnly:
    """The timings of each answer, by its index."""

    def __init__(self) -> None:
        self._timings: dict[object, Mapping[str, Any]] = {}

    def timings(self) -> Mapping[str, Any] | None:
        return next(iter(self._timings.values()), None)

    def other_timings(self) -> Iterable[object]:
        return list(self._timings.values())[1:]

    def add(self, piece: Mapping[str, Any]) -> None:
        if found := piece.get("timings"):
            self._timings[_index(piece)] = found

    def pack(self) -> None:
        return

    def take(self, body: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        for piece in [body] if isinstance(body, Mapping) else body:
            self.add(piece)

    def message(self) -> Mapping[str, Any] | None:
        return None


def _index(piece: Mapping[str, Any]) -> object:
    choices = piece.get("choices")
    return (choices[0] if choices else piece).get("index")


def token_timings(cached: int, computed: int, decoded: int) -> Mapping[str, int]:
    """Return the members of `timings` that an API has which reports only tokens."""
    return {"cache_n": cached, "prompt_n": computed, "predicted_n": decoded}


# What the whole answer takes from the last piece of choice 0, besides members unknown to us.
_OURS: Final = frozenset({"choices", "object", "prompt_progress", "usage", "timings"})
_CHOICES_MAX: Final = 1024


@dataclass(slots=True)
class _Call:
    id: str = ""
    type: str = "function"
    name: str = ""
    arguments: list[str] = field(default_factory=list)

    def add(self, delta: Mapping[str, Any]) -> None:
        function = delta.get("function") or {}
        self.id = delta.get("id") or self.id
        self.type = delta.get("type") or self.type
        self.name = function.get("name") or self.name
        self.arguments.append(function.get("arguments") or "")

    def whole(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"type": self.type, "function": function, "id": self.id}


@dataclass(slots=True)
class _Choice:
    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[int, _Call] = field(default_factory=dict)
    finish_reason: str | None = None
    last: Mapping[str, Any] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)
    packed: int = 0  # texts that are part of the first one

    def add(self, piece: Mapping[str, Any]) -> None:
        delta = piece.get("delta") or {}
        if text := delta.get("content") or piece.get("text"):
            self.content.append(text)
        if text := delta.get("reasoning_content"):
            self.reasoning.append(text)
        for call in delta.get("tool_calls") or ():
            self.calls.setdefault(call["index"], _Call()).add(call)
        self.finish_reason = piece.get("finish_reason") or self.finish_reason

    @property
    def is_blank(self) -> bool:
        return not (self.calls or any(self.content) or any(self.reasoning))

    def pack(self) -> None:
        arguments = [call.arguments for call in self.calls.values()]
        self.packed += max(0, len(self.content) - 1)
        for texts in filter(None, (self.content, self.reasoning, *arguments)):
            texts[:] = ["".join(texts)]

    def unfinished(self) -> Unfinished | None:
        if self.finish_reason or self.calls or self.reasoning:
            return None
        tokens = self.packed + len(self.content)
        return Unfinished("".join(self.content), tokens, self.last.get("id"))

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self.content)}
        if reasoning := "".join(self.reasoning):
            message["reasoning_content"] = reasoning
        if self.calls:
            message["tool_calls"] = [self.calls[at].whole() for at in sorted(self.calls)]
        return message


class ChatAssembler:
    def __init__(self, *, is_chat: bool) -> None:
        self._is_chat = is_chat
        self._choices: dict[int, _Choice] = {}
        self._latest = _Choice()
        self._body: Mapping[str, Any] = {}

    @property
    def is_complete(self) -> bool:
        """Whether every choice that began has ended."""
        choices = self._choices.values()
        return bool(choices) and all(choice.finish_reason for choice in choices)

    @property
    def is_blank(self) -> bool:
        """Whether any choice has nothing to show."""
        return any(choice.is_blank for choice in self._choices.values())

    def add(self, piece: Mapping[str, Any]) -> None:
        for part in piece["choices"]:
            if (choice := self._choices.get(part["index"])) is None:
                choice = self._choices[part["index"]] = _Choice()
            choice.add(part)
            choice.last = piece
            self._latest = choice
        if len(self._choices) > _CHOICES_MAX:
            raise InvalidEvent(f"it has more than {_CHOICES_MAX} choices")
        for name in ("usage", "timings"):
            if name in piece:
                self._latest.figures[name] = piece[name]

    def unfinished(self) -> Unfinished | None:
        """Return the text of a stream that broke off; None if it is more than plain text."""
        is_plain = self._is_chat and len(self._choices) <= 1
        return self._first().unfinished() if is_plain else None

    def pack(self) -> None:
        for choice in self._choices.values():
            choice.pack()

    def take(self, body: Mapping[str, Any]) -> None:
        self._body = body

    def message(self) -> Mapping[str, Any] | None:
        """The message of the first choice, as a client repeats it in its next request."""
        if self._body:
            message: Mapping[str, Any] = self._body["choices"][0]["message"]
            return message
        return self._first().message() if self._is_chat and self.is_complete else None

    def timings(self) -> Mapping[str, Any] | None:
        return self._body.get("timings") or self._first().figures.get("timings")

    def other_timings(self) -> Iterable[object]:
        others = (choice for index, choice in self._choices.items() if index)
        return [choice.figures.get("timings") for choice in others]

    def whole(self) -> dict[str, Any]:
        if not self.is_complete:
            raise InvalidEvent("the stream ended before the answer was complete")
        first = self._first()
        shared = {name: value for name, value in first.last.items() if name not in _OURS}
        return {
            "choices": [self._part(index) for index in sorted(self._choices)],
            **shared,
            "object": "chat.completion" if self._is_chat else "text_completion",
            **first.figures,
        }

    def _first(self) -> _Choice:
        return self._choices.get(0) or _Choice()

    def _part(self, index: int) -> dict[str, Any]:
        choice = self._choices[index]
        finished = {"index": index, "finish_reason": choice.finish_reason}
        if self._is_chat:
            return {**finished, "message": choice.message()}
        return {**finished, "text": "".join(choice.content), "logprobs": None}


# What each kind of piece adds to its block, and where; a call's input comes as JSON in parts.
_ADDS: Final = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}


@dataclass(slots=True)
class _Block:
    began: Mapping[str, Any]
    parts: dict[str, list[str]] = field(default_factory=dict)

    def add(self, delta: Mapping[str, Any]) -> None:
        name = _ADDS[delta["type"]]
        self.parts.setdefault(name, []).append(delta[name])

    def pack(self) -> None:
        for parts in self.parts.values():
            parts[:] = ["".join(parts)]

    def whole(self) -> dict[str, Any]:
        added: dict[str, Any] = {name: "".join(parts) for name, parts in self.parts.items()}
        text = added.pop("partial_json", None)
        if self.began.get("type") == "tool_use":
            added["input"] = _input(text) if text else self.began.get("input", {})
        return {**self.began, **added}


class MessagesAssembler:
    def __init__(self) -> None:
        self.is_complete = False
        self._message: dict[str, Any] = {"usage": {}}
        self._blocks: dict[int, _Block] = {}

    @property
    def is_blank(self) -> bool:
        """Whether it has nothing to show, or no start.

        Source: llama-server, build 10434: where the first token is a part of a letter, the stream
        leaves out `message_start`.
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

    def pack(self) -> None:
        for block in self._blocks.values():
            block.pack()

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

    def other_timings(self) -> Iterable[object]:
        return ()

    def whole(self) -> dict[str, Any]:
        if not self.is_complete:
            raise InvalidEvent("the stream ended before the answer was complete")
        return {**self._message, "content": self._content}

    @property
    def _content(self) -> list[dict[str, Any]]:
        return [self._blocks[at].whole() for at in sorted(self._blocks)]


def _input(text: str) -> Any:
    """Return a tool's input; nothing where the call was cut."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return {}


class ResponsesAssembler:
    def __init__(self) -> None:
        self._response: Mapping[str, Any] = {}
        self._timings: Mapping[str, Any] | None = None

    @property
    def is_complete(self) -> bool:
        return bool(self._response)

    @property
    def is_blank(self) -> bool:
        return not self._response.get("output")

    def add(self, piece: Mapping[str, Any]) -> None:
        if piece.get("type") == "response.completed":
            self.take(piece["response"])
            self._timings = piece.get("timings")

    def pack(self) -> None:
        return  # only its last piece is kept

    def take(self, body: Mapping[str, Any]) -> None:
        usage, self._response = body["usage"], body
        cached = usage.get("input_tokens_details", {}).get("cached_tokens", 0)
        self._timings = token_timings(
            cached, usage["input_tokens"] - cached, usage["output_tokens"]
        )

    def other_timings(self) -> Iterable[object]:
        return ()

    def message(self) -> Mapping[str, Any] | None:
        parts = [part for item in self._response.get("output", ()) for part in _parts(item)]
        return {"role": "assistant", "content": parts} if parts else None

    def timings(self) -> Mapping[str, Any] | None:
        return self._timings

    def whole(self) -> dict[str, Any]:
        if not self.is_complete:
            raise InvalidEvent("the stream ended before the answer was complete")
        output = [{"status": "completed", **item} for item in self._response["output"]]
        created_at = self._response.get("created_at")
        return {"completed_at": created_at, **self._response, "output": output}


def _parts(item: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return an item as parts of content: a message's own, or itself."""
    return item["content"] if item.get("type") == "message" else [item]


class Response(Protocol):
    """One response while its pieces arrive.

    A piece or body of another kind raises InvalidEvent, LookupError, TypeError or AttributeError.
    """

    def add(self, piece: Mapping[str, Any], /) -> None:
        """Take the next piece of a stream."""

    def message(self) -> Mapping[str, Any] | None: ...

    def timings(self) -> Mapping[str, Any] | None: ...

    def other_timings(self) -> Iterable[object]:
        """Those of the further answers to the prompt."""


class ResponseReader(Response, Protocol):
    def pack(self) -> None:
        """Keep what was read in little memory: tokens alone take ten times as much."""

    def take(self, body: Mapping[str, Any], /) -> None:
        """Read a whole body."""


class Assembler(Response, Protocol):
    """Makes a whole response out of a stream."""

    @property
    def is_complete(self) -> bool: ...

    @property
    def is_blank(self) -> bool:
        """Whether it has nothing to show, or too little: a stream may have left it out."""

    def whole(self) -> dict[str, Any]:
        """Return the whole response; raises InvalidEvent before it is complete."""


def assembler_for(kind: EndpointKind, members: Mapping[str, Any]) -> Assembler:
    """Return what assembles the response to a request with these members."""
    match kind:
        case EndpointKind.MESSAGES:
            return MessagesAssembler()
        case EndpointKind.RESPONSES:
            return ResponsesAssembler()
        case EndpointKind.LLAMA_COMPLETION:
            return LlamaCompletionAssembler(has_tokens=members.get("return_tokens") is True)
        case _:
            return ChatAssembler(is_chat=kind is EndpointKind.CHAT)


def reader_for(kind: EndpointKind) -> ResponseReader:
    match kind:
        case EndpointKind.CHAT:
            return ChatAssembler(is_chat=True)
        case EndpointKind.MESSAGES:
            return MessagesAssembler()
        case EndpointKind.RESPONSES:
            return ResponsesAssembler()
        case _:
            return TimingsOnly()
