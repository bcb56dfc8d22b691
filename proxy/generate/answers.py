"""llama-server's answers in the format of the plain endpoints. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from proxy.upstream.sse import Splitter, members_of


def generated(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return one completion; `token_ids` are those generated, without the prompt's."""
    return {
        "token_ids": answer["tokens"],
        "text": answer["content"],
        "num_generated": len(answer["tokens"]),
    }


def tokenized(answer: Mapping[str, Any]) -> dict[str, Any]:
    return {"token_ids": answer["tokens"], "num_tokens": len(answer["tokens"])}


class TokenEvents:
    """A stream of `/completion` as events `token`, and one event `done`."""

    def __init__(self) -> None:
        self._splitter = Splitter()

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes, return the events for the client; raises InvalidEvent."""
        return b"".join([_events(event) for event in self._splitter.feed(chunk)])


def _events(event: bytes) -> bytes:
    piece = members_of(event)
    if piece is None:
        return b""
    if "error" in piece:
        return _event(b"error", piece)
    *silent, last = piece.get("tokens") or [None]
    tokens = [{"token_id": token, "text": ""} for token in silent]
    if last is not None:  # the last of them completed the text
        tokens.append({"token_id": last, "text": piece.get("content", "")})
    end = _event(b"done", {"num_generated": piece["tokens_predicted"]}) if _is_end(piece) else b""
    return b"".join([_event(b"token", token) for token in tokens]) + end


def _is_end(piece: Mapping[str, Any]) -> bool:
    return piece.get("stop") is True and isinstance(piece.get("tokens_predicted"), int)


def _event(name: bytes, members: Mapping[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name, orjson.dumps(members))
