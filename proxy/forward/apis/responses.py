"""OpenAI's response out of the pieces of a stream: the last holds nearly all of it. Pure.

Source: llama-server, build 10434, both responses at temperature 0; the whole has no `timings`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from proxy.forward.apis.native import token_timings
from proxy.upstream.sse import InvalidEvent


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
