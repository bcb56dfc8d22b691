"""Plain endpoints that an instance answers at an endpoint of its own: one class for each."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final

import orjson
from aiohttp import web
from multidict import CIMultiDict

from proxy.access_log import AccessRecord
from proxy.endpoints import EndpointKind
from proxy.errors import BadRequest, UpstreamFailed
from proxy.forward.client_response import ClientResponse
from proxy.forward.rewritten_response import RewrittenResponse
from proxy.generate import answers, sampling
from proxy.request import Translation

_COMPLETION: Final = "/completion"
TOKENIZE: Final = "/tokenize"


class _Whole(RewrittenResponse):
    """A whole response; an error stays as it is."""

    def translated(self, answer: Any) -> dict[str, Any]:
        """Return llama-server's answer in our format."""
        raise NotImplementedError

    def rewritten(self, status: int, body: bytes) -> bytes:
        if status != HTTPStatus.OK:
            return body
        try:
            return orjson.dumps(self.translated(orjson.loads(body)))
        except (ValueError, LookupError, TypeError) as error:
            raise UpstreamFailed(
                f"{self.record.instance} answered in another format: {error!r}"
            ) from error


class GenerateResponse(_Whole):
    def translated(self, answer: Any) -> dict[str, Any]:
        return answers.generated(answer)

    def translation(self) -> Translation:
        return Translation(_COMPLETION, EndpointKind.LLAMA_COMPLETION, _one)


class TokenizeResponse(_Whole):
    """llama-server's own answer to `content`, and ours to `text`."""

    def __init__(self, request: web.BaseRequest, record: AccessRecord) -> None:
        super().__init__(request, record)
        self._has_text = False

    def translation(self) -> Translation:
        return Translation(TOKENIZE, EndpointKind.INFO, self._members)

    def translated(self, answer: Any) -> dict[str, Any]:
        return answers.tokenized(answer)

    def rewritten(self, status: int, body: bytes) -> bytes:
        return super().rewritten(status, body) if self._has_text else body

    def _members(self, members: dict[str, Any]) -> dict[str, Any]:
        self._has_text = "text" in members and "content" not in members
        return tokenize_members(members, members["text"]) if self._has_text else members


class StreamGenerateResponse(ClientResponse):
    """Events `token` as they arrive, one event `done`, or one event `error`."""

    def __init__(self, request: web.BaseRequest, record: AccessRecord) -> None:
        super().__init__(request, record)
        self._events = answers.TokenEvents()

    def translation(self) -> Translation:
        return Translation(_COMPLETION, EndpointKind.LLAMA_COMPLETION, _stream)

    def put(self, _chunk: bytes) -> bool:
        """Leave it to `write`."""
        return False

    async def write(self, chunk: bytes) -> None:
        if events := self._events.feed(chunk):
            await super().write(events)

    async def finish(self, last: bytes = b"") -> None:
        await super().finish(self._events.feed(last))

    async def refuse(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        self._events = _Unchanged()
        await super().refuse(status, headers, body)


class _Unchanged(answers.TokenEvents):
    def feed(self, chunk: bytes) -> bytes:
        return chunk


def tokenize_members(members: Mapping[str, Any], text: object) -> dict[str, Any]:
    """Return llama-server's request for the tokens of a text; raises BadRequest."""
    if not isinstance(text, str):
        raise BadRequest("a text must be a string")
    return {**sampling.with_model(members), "content": text}


def _one(members: dict[str, Any]) -> dict[str, Any]:
    return sampling.completion_of(members, is_stream=False)


def _stream(members: dict[str, Any]) -> dict[str, Any]:
    return sampling.completion_of(members, is_stream=True)


TranslatedResponse = GenerateResponse | StreamGenerateResponse | TokenizeResponse
TRANSLATED: Final[Mapping[str, type[TranslatedResponse]]] = MappingProxyType(
    {
        "/generate": GenerateResponse,
        "/stream/generate": StreamGenerateResponse,
        TOKENIZE: TokenizeResponse,
    }
)
