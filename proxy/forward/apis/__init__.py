"""What responses contain, one file for each API.

An assistant's message is in the format of OpenAI's chat API; its content may be a list of parts in
the format of the API at hand. APIs without roles have no message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from proxy.endpoints import EndpointKind
from proxy.forward.apis.chat import ChatAssembler
from proxy.forward.apis.messages import MessagesAssembler
from proxy.forward.apis.native import LlamaCompletionAssembler, TimingsOnly
from proxy.forward.apis.responses import ResponsesAssembler


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
