"""Which requests the engine gets in another form, and whose responses are made its client's own."""

from __future__ import annotations

from proxy.endpoints import EndpointKind
from proxy.forward.client_response import RequestWriter
from proxy.forward.messages_writer import MessagesWriter, as_chat
from proxy.forward.responses_writer import ResponsesWriter
from proxy.request import ProxyRequest
from proxy.responses.stored_turn import StoredTurn


def translated(
    request: ProxyRequest, client_response: RequestWriter, turn: StoredTurn | None
) -> tuple[ProxyRequest, RequestWriter]:
    """Return what the engine is asked, and what makes the client's response of its own."""
    if request.kind is EndpointKind.RESPONSES:
        return request, ResponsesWriter(client_response, request, turn)
    if request.kind is EndpointKind.MESSAGES and (chat := as_chat(request)):
        return chat, MessagesWriter(client_response)
    return request, client_response
