"""The text of an answer, in any of the APIs. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import orjson

from proxy.endpoints import EndpointKind
from proxy.forward.apis import assembler_for
from proxy.upstream.sse import InvalidEvent, Splitter, objects_of
from supervisor.replay.capture import CapturedRequest

# In the order in which a model writes them.
_TEXTS: Final = ("reasoning_content", "thinking", "summary", "content", "text", "name", "arguments")
_INSIDE: Final = ("function", "tool_calls")


def recorded_text(request: CapturedRequest) -> str | None:
    """Return the text that was captured; None where it is not whole."""
    response = request.response
    if response is None or not response.is_whole:
        return None
    try:
        if not response.is_stream:
            return text_of(request.kind, orjson.loads(response.body))
        assembler = assembler_for(request.kind, {})
        for piece in objects_of(Splitter().feed(response.body.encode())):
            assembler.add(piece)
        return text_of(request.kind, assembler.whole())
    except (InvalidEvent, ValueError, LookupError, TypeError, AttributeError):
        return None


def text_of(kind: EndpointKind, whole: Mapping[str, Any]) -> str:
    """Return all text of a whole response; raises LookupError or TypeError for another format."""
    match kind:
        case EndpointKind.CHAT:
            root = whole["choices"][0]["message"]
        case EndpointKind.COMPLETION:
            root = {"text": whole["choices"][0]["text"]}
        case EndpointKind.RESPONSES:
            root = whole["output"]
        case _:
            root = {"content": whole["content"]}
    return "".join(_texts(root))


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
    elif isinstance(value, dict):
        for name in (*_TEXTS, *_INSIDE):
            yield from _texts(value.get(name))
        if "input" in value:
            yield orjson.dumps(value["input"]).decode()
