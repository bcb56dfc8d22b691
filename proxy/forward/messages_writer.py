"""Passes the engine's chat completion on as a message of Anthropic's API."""

from __future__ import annotations

from dataclasses import replace

import orjson
from multidict import CIMultiDict

from proxy.adapter import MEMBER
from proxy.endpoints import EndpointKind
from proxy.errors import BadRequest
from proxy.forward.apis.messages import MessagesAssembler
from proxy.forward.translated_writer import Events, TranslatedWriter
from proxy.forward.upstream_errors import client_error_body
from proxy.messages.chat_request import PATH, chat_members, schema_of
from proxy.messages.message_events import MessageEvents, events_of
from proxy.request import ProxyRequest


class MessagesWriter(TranslatedWriter):
    def new_events(self) -> Events:
        return MessageEvents()

    def whole(self, body: bytes) -> bytes:
        given = orjson.loads(body)
        if "choices" not in given:  # no completion
            return body
        assembler = MessagesAssembler()
        for event in events_of(given):
            assembler.add(event)
        return orjson.dumps(assembler.whole())

    def keep_alive(self, _kind: EndpointKind) -> None:
        super().keep_alive(EndpointKind.MESSAGES)

    async def refuse(self, status: int, headers: CIMultiDict[str], body: bytes) -> None:
        body = client_error_body(EndpointKind.MESSAGES, "/v1/messages", status, body)
        headers["Content-Length"] = str(len(body))
        await super().refuse(status, headers, body)


def as_chat(request: ProxyRequest) -> ProxyRequest | None:
    """Return a request for a message as one of the chat API, if only that knows its members.

    So it is for an owner that shares no caches: only a chat can name its slot.

    Raises:
        BadRequest: It has no messages.
    """
    schema = schema_of(request.json)
    if schema is None and not request.json.get(MEMBER) and not request.owner.is_alone:
        return None
    if "messages" not in request.json:
        raise BadRequest("'messages' is required")
    members = chat_members(request.json, schema)
    return replace(
        request, path=PATH, kind=EndpointKind.CHAT, json=members, body=orjson.dumps(members)
    )
