"""A stream of an engine as lines of JSON. Pure, but for its clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import orjson

from proxy.ollama.answer import Answer, Delta, Shape, whole_piece
from proxy.upstream.sse import DONE, InvalidEvent, Splitter, data_of, members_of

Durations = Callable[[], Mapping[str, int]]


class AnswerLines:
    """One answer; `is_over` after its last line.

    Args:
        model: The name that the client gave.
        shape: How the endpoint writes what a piece adds.
        durations: Returns the members that say how long the request has taken.
    """

    def __init__(self, model: str, shape: Shape, durations: Durations) -> None:
        self.is_over = False
        self._model = model
        self._shape = shape
        self._durations = durations
        self._answer = Answer()
        self._splitter = Splitter()

    def feed(self, chunk: bytes) -> bytes:
        """Take the engine's next bytes, return the client's; raises InvalidEvent."""
        return b"".join(
            [line for event in self._splitter.feed(chunk) for line in self._lines(event)]
        )

    def whole(self, body: Mapping[str, Any]) -> bytes:
        """Return a whole answer; raises what reading another format raises."""
        delta = self._answer.add(whole_piece(body))
        called, last = self._answer.end()
        return self._written(replace(delta, calls=called.calls), self._durations(), last)

    def _lines(self, event: bytes) -> Iterator[bytes]:
        if self.is_over:
            return
        if data_of(event) == DONE:
            yield from self._end()
            return
        if (piece := members_of(event)) is None:  # a comment
            return
        if "error" in piece:
            self.is_over = True
            yield failure(piece)
            return
        try:
            delta = self._answer.add(piece)
        except (LookupError, TypeError, AttributeError) as error:
            raise InvalidEvent(f"an event is no piece of an answer: {error!r}") from error
        if not delta.is_empty:
            yield self._written(delta, {"done": False})
        if self._answer.is_over:
            yield from self._end()

    def _end(self) -> Iterator[bytes]:
        called, last = self._answer.end()
        if called.calls:
            yield self._written(called, {"done": False})
        yield self._written(Delta(), self._durations(), last)
        self.is_over = True

    def _written(self, delta: Delta, *members: Mapping[str, Any]) -> bytes:
        line = {**header(self._model), **self._shape(delta)}
        for more in members:
            line.update(more)
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)


def header(model: str) -> dict[str, str]:
    """Return the members that every line begins with."""
    now = datetime.now(tz=UTC).isoformat().replace("+00:00", "Z")
    return {"model": model, "created_at": now}


def failure(body: Mapping[str, Any]) -> bytes:
    """Return an error of an engine, or of ours in OpenAI's format, as Ollama writes one."""
    error = body.get("error")
    message = error.get("message") if isinstance(error, dict) else error
    return orjson.dumps({"error": str(message)}, option=orjson.OPT_APPEND_NEWLINE)
