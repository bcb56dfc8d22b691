"""An HTTP request as an Ask: which model, which page, which bytes.

The body is read once and never past the limit. Of JSON only two members matter here: `model`,
which says where it goes, and `id_slot`, which is taken out: a client that pins a slot in use
corrupts another client's text (builds 10434 and 11434). All else passes byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
from aiohttp import web
from multidict import CIMultiDict

from proxy.dispatch import ModelCard
from proxy.errors import BadRequest, BodyTooLarge, UnknownModel, known_models
from proxy.headers import for_upstream

_FORM_MODEL: Final = re.compile(
    rb'\r\ncontent-disposition:[^\r\n]*\bname="?model"?[^\r\n]*\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]+)',
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client wants of a model.

    Attributes:
        request_id: The name of this request in logs and headers.
        method: HTTP method, upper case.
        path: Path of the page, decoded; one of the table in `app`.
        query: Query string as it was sent, without the question mark.
        headers: What of the client's header an instance may see.
        body: The bytes to pass on; empty where the method has no body.
        model: The id of the model it is for.
        is_stream: Whether the client asked for server-sent events.
    """

    request_id: str
    method: str
    path: str
    query: str
    headers: CIMultiDict[str]
    body: bytes
    model: str
    is_stream: bool


async def read_ask(
    request: web.Request, request_id: str, max_body_bytes: int, cards: Sequence[ModelCard]
) -> Ask:
    """Read a request to its end.

    Args:
        request: The request; its body not yet read.
        request_id: Its name.
        max_body_bytes: Largest body taken.
        cards: The models there are; a client that names none means the only one.

    Raises:
        BadRequest: The body is broken, is no JSON object, or leaves open which model it means.
        BodyTooLarge: The body has more than `max_body_bytes` bytes.
        UnknownModel: No model has the name.
    """
    body, headers = b"", for_upstream(request.headers)
    members: dict[str, Any] = {}
    if request.method == "POST":
        body = await _read_body(request, max_body_bytes)
        if request.content_type.startswith("multipart/"):
            members = {"model": _form_model(body)}
        else:
            members = _members(body)
            body = _without_slot(members, body)
            # An engine takes only 8 KiB of what curl -d calls a form.
            headers["Content-Type"] = "application/json"
    return Ask(
        request_id=request_id,
        method=request.method,
        path=request.path,
        query=request.rel_url.raw_query_string,
        headers=headers,
        body=body,
        model=find_model(_named(members) or request.query.get("model"), cards).id,
        is_stream=members.get("stream") is True,
    )


def find_model(name: str | None, cards: Sequence[ModelCard]) -> ModelCard:
    """Return the model that a client means; if there is only one, no name means that one.

    Raises:
        BadRequest: No name was given, and there is a choice.
        UnknownModel: No model has that name.
    """
    known = [card.id for card in cards]
    if not name:
        if len(cards) == 1:
            return cards[0]
        raise BadRequest(f"the request names no model ({known_models(known)})")
    for card in cards:
        if name == card.id or name in card.aliases:
            return card
    raise UnknownModel(name, known)


async def _read_body(request: web.Request, max_bytes: int) -> bytes:
    if (request.content_length or 0) > max_bytes:
        raise BodyTooLarge(max_bytes)
    body = bytearray()
    try:
        async for chunk in request.content.iter_any():
            body += chunk
            if len(body) > max_bytes:
                raise BodyTooLarge(max_bytes)
    except web.RequestPayloadError as error:
        raise BadRequest(f"the body cannot be read: {error}") from error
    return bytes(body)


def _members(body: bytes) -> dict[str, Any]:
    try:
        members = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(members, dict):
        raise BadRequest("the body must be a JSON object")
    return members


def _without_slot(members: dict[str, Any], body: bytes) -> bytes:
    if "id_slot" not in members:
        return body
    return orjson.dumps({key: value for key, value in members.items() if key != "id_slot"})


def _named(members: dict[str, Any]) -> str | None:
    name = members.get("model")
    if name is None or isinstance(name, str):
        return name
    raise BadRequest("the member model must be a string")


def _form_model(body: bytes) -> str | None:
    field = _FORM_MODEL.search(body)
    return field[1].decode("utf-8", "replace") if field else None
