"""llama-server's own completion, and the responses of which only `timings` are read. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

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
