"""The response to a request of Ollama's API: JSON in lines, or one line."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, ClassVar, Final

import orjson
from aiohttp import web
from multidict import CIMultiDict

from proxy.access_log import AccessRecord
from proxy.endpoints import EndpointKind
from proxy.forward.client_response import ClientResponse, RequestWriter
from proxy.forward.translated_writer import Events, TranslatedWriter
from proxy.ollama.answer import Delta, Shape, as_message, as_response
from proxy.ollama.engine_request import EngineRequest
from proxy.ollama.lines import AnswerLines, failure, header
from proxy.ollama.vectors import prompt_tokens, vectors_of
from proxy.router.lease import Lease

LINES: Final = "application/x-ndjson"
# Names of what a request gave and nothing was made of.
IGNORED: Final = "X-Corral-Ignored"
_LINE_END: Final = b"\n"
_IGNORED_MAX_CHARACTERS: Final = 512


class OllamaResponse(ClientResponse):
    """A response to one of Ollama's endpoints; `take` says to what.

    Attributes:
        model: The name that the client gave.
    """

    stream_type: ClassVar[str] = LINES
    piece_end: ClassVar[bytes] = _LINE_END

    def __init__(self, request: web.BaseRequest, record: AccessRecord) -> None:
        super().__init__(request, record)
        self.model = ""
        self._asked: EngineRequest | None = None
        self._began_at_s = time.monotonic()
        self._queued_s = 0.0

    def take(self, model: str, asked: EngineRequest | None) -> None:
        """Note what the request is for; None: it loads the model."""
        self.model, self._asked = model, asked

    def empty(self) -> dict[str, Any]:
        """Return the members of a line without text."""
        raise NotImplementedError

    def writer(self) -> RequestWriter:
        return _Writer(self)

    def lines(self) -> Events:
        raise NotImplementedError

    def whole(self, body: Mapping[str, Any]) -> bytes:
        """Translate a whole answer; raises as reading another format does."""
        raise NotImplementedError

    def durations(self) -> Mapping[str, int]:
        total_s = time.monotonic() - self._began_at_s
        return {"total_duration": int(total_s * 1e9), "load_duration": int(self._queued_s * 1e9)}

    def leased(self, lease: Lease) -> None:
        super().leased(lease)
        self._queued_s = lease.queued_s
        if self._asked and self._asked.ignored:
            names = ", ".join(ascii(name)[1:-1] for name in self._asked.ignored)
            more = {IGNORED: names[:_IGNORED_MAX_CHARACTERS]}
            self.extra_headers = {**self.extra_headers, **more}

    async def refuse(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        body = failure(orjson.loads(body))
        headers["Content-Length"] = str(len(body))
        await super().refuse(status, headers, body)

    def ping(self, _kind: EndpointKind) -> bytes:
        line = {**header(self.model), **self.empty(), "done": False}
        return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)

    def error_piece(self, body: bytes) -> bytes:
        return failure(orjson.loads(body))


class _TextResponse(OllamaResponse):
    shape: ClassVar[Shape]

    def empty(self) -> dict[str, Any]:
        return type(self).shape(Delta())

    def lines(self) -> AnswerLines:
        return AnswerLines(self.model, type(self).shape, self.durations)

    def whole(self, body: Mapping[str, Any]) -> bytes:
        return self.lines().whole(body)


class ChatResponse(_TextResponse):
    shape = as_message


class GenerateResponse(_TextResponse):
    shape = as_response


class EmbedResponse(OllamaResponse):
    def empty(self) -> dict[str, Any]:
        return {"embeddings": []}

    def whole(self, body: Mapping[str, Any]) -> bytes:
        vectors = vectors_of(body, self._asked.dimensions if self._asked else None)
        counted = {**self.durations(), "prompt_eval_count": prompt_tokens(body)}
        return orjson.dumps({"model": self.model, "embeddings": vectors, **counted})


class EmbeddingsResponse(OllamaResponse):
    def empty(self) -> dict[str, Any]:
        return {"embedding": []}

    def whole(self, body: Mapping[str, Any]) -> bytes:
        (vector,) = vectors_of(body, None)
        return orjson.dumps({"embedding": vector})


class _Writer(TranslatedWriter):
    """Passes one instance's answer on."""

    def __init__(self, response: OllamaResponse) -> None:
        super().__init__(response)
        self._response = response

    def new_events(self) -> Events:
        return self._response.lines()

    def whole(self, body: bytes) -> bytes:
        return self._response.whole(orjson.loads(body))

    async def _begin_stream(self, status: int, headers: CIMultiDict[str]) -> None:
        headers["Content-Type"] = LINES
        await super()._begin_stream(status, headers)
