"""The responses to the prompts of an array, combined as the engine would do it. Pure.

Source: llama-server, build 10434, measured. A text completion has the timings of the first prompt;
embeddings and reranking have the sum of `usage`; llama-server's own endpoints return a list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson

from proxy.endpoints import EndpointKind
from proxy.errors import UpstreamFailed
from proxy.forward.array import PromptArray
from proxy.upstream.sse import DONE, data_of

# The answers are held until the last is there.
GATHERED_MAX_BYTES: Final = 128 * 1024**2
_LISTS: Final = ("choices", "data", "results")
_SCORES: Final = ("relevance_score", "score")


class Gather:
    """The whole responses to the prompts of one request."""

    def __init__(self, array: PromptArray) -> None:
        self._array = array
        self._base: dict[int, dict[str, Any] | None] = {}
        self._items: dict[int, list[bytes]] = {}
        self._scores: dict[bytes, float] = {}
        self._usage: dict[str, int] = {}
        self._size_bytes = 0
        self._list = ""

    def add(self, at: int, body: bytes) -> None:
        """Take the response to one prompt; raises UpstreamFailed."""
        self._size_bytes += len(body)
        if self._size_bytes > GATHERED_MAX_BYTES:
            limit = f"{GATHERED_MAX_BYTES} bytes"
            raise UpstreamFailed(
                f"the responses are larger than {limit}; send fewer prompts at once"
            )
        try:
            self._take(at, orjson.loads(body))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise UpstreamFailed(
                f"the response to prompt {at} has another format: {error!r}"
            ) from error

    def pieces(self) -> Iterator[bytes]:
        """Yield the combined response, piece by piece."""
        base = self._base[0]
        if base is None:
            yield b"["
            yield from self._listed()
            yield b"]"
            return
        shared = {**base, "usage": self._usage} if self._usage else base
        yield orjson.dumps(shared)[:-1] + (b',"%s":[' % self._list.encode())
        yield from self._listed()
        yield b"]}"

    def _take(self, at: int, answer: Any) -> None:
        array = self._array
        is_bare = array.request.kind is EndpointKind.LLAMA_COMPLETION and isinstance(answer, dict)
        items = [answer] if is_bare else answer
        base = None
        if isinstance(items, dict):
            self._list = next(name for name in _LISTS if name in items)
            base = {name: value for name, value in items.items() if name != self._list}
            items = items[self._list]
            if array.request.kind is EndpointKind.EMBED_OR_RERANK:
                self._count(base.get("usage"))
        first = at * array.choices
        numbered = [_numbered(item, first + number) for number, item in enumerate(items)]
        self._base[at] = base if at == 0 else None
        self._items[at] = [orjson.dumps(item) for item in numbered]
        if array.is_ranked:
            self._rank(at, numbered)

    def _rank(self, at: int, items: list[dict[str, Any]]) -> None:
        for written, item in zip(self._items[at], items, strict=True):
            self._scores[written] = next(item[name] for name in _SCORES if name in item)

    def _count(self, usage: Mapping[str, int] | None) -> None:
        for name, tokens in (usage or {}).items():
            self._usage[name] = self._usage.get(name, 0) + tokens

    def _listed(self) -> Iterator[bytes]:
        """Yield the items with a comma before each but the first."""
        items = [item for at in range(len(self._array.prompts)) for item in self._items[at]]
        if self._array.is_ranked:
            items = sorted(items, key=lambda item: -self._scores[item])[: self._array.top_n]
        for number, item in enumerate(items):
            yield b"," + item if number else item


def _numbered(item: dict[str, Any], number: int) -> dict[str, Any]:
    """Return an item with its number in the whole, where it has one at all."""
    return {**item, "index": number} if "index" in item else item


class Renumber:
    """The events of several streams as those of one stream.

    Attributes:
        is_done: Whether a stream ended with `[DONE]`, which is sent once, at the end of all.
    """

    def __init__(self, array: PromptArray) -> None:
        self._array = array
        self._shared: dict[str, Any] = {}
        self.is_done = False

    def event(self, at: int, event: bytes) -> bytes:
        """Return an event of the stream of one prompt as it is passed on; empty for none."""
        data = data_of(event)
        if data == DONE:
            self.is_done = True
            return b""
        try:
            piece = orjson.loads(data)
        except orjson.JSONDecodeError:
            return event
        if not isinstance(piece, dict):  # a `null`, which says nothing
            return b""
        return b"data: " + orjson.dumps(self._numbered(at * self._array.choices, piece)) + b"\n\n"

    def _numbered(self, first: int, piece: dict[str, Any]) -> dict[str, Any]:
        for item in (piece, piece.get("__verbose"), *_choices(piece)):
            if isinstance(item, dict) and isinstance(index := item.get("index"), int):
                item["index"] = first + index
        for name in ("id", "created"):  # the stream is one answer
            if name in piece:
                piece[name] = self._shared.setdefault(name, piece[name])
        return piece


def _choices(piece: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = piece.get("choices")
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
