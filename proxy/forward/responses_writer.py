"""Passes the engine's response on as OpenAI's Responses API has it."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

import orjson

from proxy.forward.client_response import RequestWriter
from proxy.forward.translated_writer import Events, TranslatedWriter
from proxy.request import ProxyRequest
from proxy.responses.response_object import completed, repeated
from proxy.responses.stored_turn import StoredTurn
from proxy.responses.stream_events import StreamEvents


class ResponsesWriter(TranslatedWriter):
    def __init__(
        self, writer: RequestWriter, request: ProxyRequest, turn: StoredTurn | None = None
    ) -> None:
        super().__init__(writer)
        self._turn = turn
        self._base = {"model": request.json.get("model", request.model), **repeated(request.json)}
        if turn is not None:
            self._base["store"] = turn.is_stored
            self._base["previous_response_id"] = turn.previous_response_id

    def new_events(self) -> Events:
        now = int(datetime.now(tz=UTC).timestamp())
        return StreamEvents(self._base, f"resp_{uuid4().hex}", now, self._store)

    def whole(self, body: bytes) -> bytes:
        given = orjson.loads(body)
        if "output" not in given:  # no response
            return body
        response = completed(self._base, given)
        self._store(response)
        return orjson.dumps(response)

    def _store(self, response: Mapping[str, Any]) -> None:
        if self._turn is not None:
            self._turn.add(response)
