"""What comes in a stream before its first token: progress, which few clients ask for. No I/O.

A piece that only says how far the prompt is computed is read, and taken out where the client did
not ask for it. So are comments: while a client waits it gets our own. From the first token on,
nothing is looked at any more.

Source: llama-server, builds 10434 and 11434: `prompt_progress` {total, cache, processed, time_ms},
tokens; `processed` counts those of the cache too. In OpenAI's responses the first piece with
progress stands in for the event `response.in_progress`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from proxy.carry.sse import Splitter, data_of, members_of
from proxy.pages import Kind

_RESPONSE_CREATED = b"event: response.created"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far an instance is with a prompt, in tokens.

    Attributes:
        done: Tokens of the prompt that are there, those of the cache among them.
        total: Tokens of the prompt.
        cached: Tokens that came out of the cache.
    """

    done: int
    total: int
    cached: int


def progress_of(piece: Mapping[str, Any]) -> Progress | None:
    """Return the progress that a piece tells, or None where it tells something else."""
    said = piece.get("prompt_progress")
    if not isinstance(said, dict):
        return None
    figures = [said.get(name) for name in ("processed", "total", "cache")]
    done, total, cached = (figure if isinstance(figure, int) else 0 for figure in figures)
    return Progress(done, total, cached)


def is_said(event: bytes) -> bool:
    """Return whether an event without progress is of the answer, and not of its beginning."""
    return not event.startswith(_RESPONSE_CREATED)


class Prelude:
    """One stream up to its first token.

    Attributes:
        latest: The last progress that was told, or None.
        is_over: Whether the first token has come; then bytes need not be fed any more.
    """

    def __init__(self, kind: Kind, *, hides_progress: bool) -> None:
        self.latest: Progress | None = None
        self.is_over = False
        self._splitter = Splitter()
        self._is_responses = kind is Kind.RESPONSES
        self._hides_progress = hides_progress

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes, return those that are for the client.

        Raises:
            Garbled: They are not the events that were asked for.
        """
        kept = b"".join([self._kept(event) for event in self._splitter.feed(chunk)])
        return kept + self._splitter.rest() if self.is_over else kept

    def _kept(self, event: bytes) -> bytes:
        if self.is_over:
            return event
        if not data_of(event):
            return b""
        piece = members_of(event) or {}
        progress = progress_of(piece)
        if progress is None:
            self.is_over = is_said(event)
            return event
        is_first, self.latest = self.latest is None, progress
        if not self._hides_progress:
            return event
        return _without_progress(event, piece) if self._is_responses and is_first else b""


def _without_progress(event: bytes, piece: Mapping[str, Any]) -> bytes:
    name, _, _ = event.partition(b"\n")
    told = {key: value for key, value in piece.items() if key != "prompt_progress"}
    return name + b"\ndata: " + orjson.dumps(told) + b"\n\n"
