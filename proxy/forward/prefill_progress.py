"""A stream before its first token: progress is read, and removed for clients that did not ask.

So are comments: a client that waits gets our own. After the first token nothing is inspected.

A chat template may end in text that belongs to the answer (`<think>` and the start of a thought).
With progress, the engine sends that text in the first progress, and the role again with each later
one; without, it sends the role once, and that text with the first token. A client that did not ask
for progress gets the second.

Source: llama-server, builds 10434 and 11434: `prompt_progress` {total, cache, processed, time_ms},
tokens; `processed` includes those of the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from proxy.upstream.sse import Splitter, data_of, members_of


@dataclass(frozen=True, slots=True)
class PrefillProgress:
    """Prompt tokens; `done` includes `cached`."""

    done: int
    total: int
    cached: int


def progress_of(piece: Mapping[str, Any]) -> PrefillProgress | None:
    """Return the progress in a piece, or None."""
    progress = piece.get("prompt_progress")
    if not isinstance(progress, dict):
        return None
    figures = [progress.get(name) for name in ("processed", "total", "cache")]
    done, total, cached = (figure if isinstance(figure, int) else 0 for figure in figures)
    return PrefillProgress(done, total, cached)


def prompt_of(piece: Mapping[str, Any]) -> PrefillProgress | None:
    """Return the figures of the prompt in Anthropic's first event, or None."""
    match piece:
        case {
            "type": "message_start",
            "message": {"usage": {"input_tokens": int(computed)} as usage},
        }:
            cached = usage.get("cache_read_input_tokens")
            found = cached if isinstance(cached, int) else 0
            return PrefillProgress(computed + found, computed + found, found)
    return None


def is_start(piece: Mapping[str, Any]) -> bool:
    """Return whether a piece only opens a response, which may come before any text."""
    match piece:
        case {"choices": [{"delta": {"role": _, "content": None}, "finish_reason": None}]}:
            return True
        case {"type": "response.created" | "response.in_progress"}:
            return True
    return False


class PrefillFilter:
    """One stream up to its first token.

    Attributes:
        latest: The last progress, or None.
        is_over: Whether the first token has arrived; then no more bytes are to be fed.
    """

    def __init__(self, *, hides_progress: bool) -> None:
        self.latest: PrefillProgress | None = None
        self.is_over = False
        self._splitter = Splitter()
        self._hides_progress = hides_progress
        self._role = b""
        self._begun: Mapping[str, Any] | None = None

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes, return those for the client; raises InvalidEvent."""
        kept = b"".join([self._kept(event) for event in self._splitter.feed(chunk)])
        return kept + self._splitter.rest() if self.is_over else kept

    def _kept(self, event: bytes) -> bytes:
        if self.is_over:
            return event
        if not data_of(event):
            return b""
        piece = members_of(event) or {}
        if progress := progress_of(piece):
            self.latest = progress
            return self._without_progress(event, piece)
        if not is_start(piece):
            self.is_over = True
            self.latest = prompt_of(piece) or self.latest
            return self._role + self._joined(event, piece)
        if self._hides_progress:  # if it is the last one is known at the next piece
            self._role, event = event, b""
        return event

    def _without_progress(self, event: bytes, piece: Mapping[str, Any]) -> bytes:
        if not self._hides_progress:
            return event
        if _text_of(piece):
            self._begun = piece
        return b""

    def _joined(self, event: bytes, piece: Mapping[str, Any]) -> bytes:
        """Return the first token behind the template's text."""
        if self._begun is None:
            return event
        begun, text = _text_of(self._begun), _text_of(piece)
        if begun and text and begun[0] == text[0]:
            return _with_text(piece, text[0], begun[1] + text[1])
        members = {key: value for key, value in self._begun.items() if key != "prompt_progress"}
        return _event(members) + event


def _text_of(piece: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the member of a chat's delta that has text, and the text; None where none has."""
    match piece:
        case {"choices": [{"delta": {"content": str(text)}}]} if text:
            return "content", text
        case {"choices": [{"delta": {"reasoning_content": str(text)}}]} if text:
            return "reasoning_content", text
    return None


def _with_text(piece: Mapping[str, Any], name: str, text: str) -> bytes:
    choice = piece["choices"][0]
    delta = {**choice["delta"], name: text}
    return _event({**piece, "choices": [{**choice, "delta": delta}]})


def _event(piece: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(piece) + b"\n\n"
