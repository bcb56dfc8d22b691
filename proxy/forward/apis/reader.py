"""The message that an answer holds and what it cost, read page by page. Pure.

The message is in the words of OpenAI's chat API, where content may be a list of parts in the words
of the page's own API. Pages without roles have no message.

Source: llama-server's answers, build 10434. Anthropic's page and a whole answer of OpenAI's
responses tell no `timings`, only tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from proxy.endpoints import EndpointKind
from proxy.forward.apis.assembler import MessagesAssembler, ResponsesAssembler
from proxy.forward.apis.chat import ChatAssembler


class ResponseReader(Protocol):
    """Reads one answer, as the pieces of a stream or as a whole body.

    What is no such answer makes it fail with InvalidEvent, LookupError, TypeError or
    AttributeError.
    """

    def timings(self) -> Mapping[str, Any] | None:
        """Return what it cost, in the words of llama-server's `timings`; None where not said."""

    def add(self, piece: Mapping[str, Any]) -> None:
        """Read the next piece of a stream."""

    def pack(self) -> None:
        """Keep what was read in as little memory as it needs."""

    def take(self, body: Mapping[str, Any]) -> None:
        """Read a whole body."""

    def message(self) -> Mapping[str, Any] | None:
        """Return the assistant's message, or None where there is none."""


def reader_of(kind: EndpointKind) -> ResponseReader:
    """Return a reader for the answer to one request."""
    match kind:
        case EndpointKind.CHAT:
            return _Chat()
        case EndpointKind.MESSAGES:
            return MessagesAssembler()
        case EndpointKind.RESPONSES:
            return ResponsesAssembler()
        case _:
            return TimingsOnly()


class TimingsOnly:
    """Any page that tells `timings` and has no message."""

    def __init__(self) -> None:
        self._timings: Mapping[str, Any] | None = None

    def timings(self) -> Mapping[str, Any] | None:
        return self._timings

    def add(self, piece: Mapping[str, Any]) -> None:
        self._timings = piece.get("timings") or self._timings

    def pack(self) -> None:
        return

    def take(self, body: Mapping[str, Any]) -> None:
        self._timings = body.get("timings")

    def message(self) -> Mapping[str, Any] | None:
        return None


class _Chat(TimingsOnly):
    def __init__(self) -> None:
        super().__init__()
        self._assembler = ChatAssembler(is_chat=True)
        self._message: Mapping[str, Any] | None = None

    def add(self, piece: Mapping[str, Any]) -> None:
        self._assembler.add(piece)
        self._timings = self._assembler.timings()

    def pack(self) -> None:
        self._assembler.pack()

    def take(self, body: Mapping[str, Any]) -> None:
        super().take(body)
        self._message = body["choices"][0]["message"]

    def message(self) -> Mapping[str, Any] | None:
        return self._message or (self._assembler.message() if self._assembler.is_complete else None)
