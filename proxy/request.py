"""An HTTP request as an Ask: which model, which page, which bytes.

The body is read once and never past the limit. `id_slot` is taken out of it: a client that pins a
slot in use corrupts another client's text (builds 10434 and 11434). For a variant of a model the
body is what the variant makes of it; any other body passes byte for byte.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
from aiohttp import StreamReader, web
from multidict import CIMultiDict

from proxy.carry.variant import Variant
from proxy.errors import BadRequest, BodyTooLarge, TooSlow
from proxy.form import model_of
from proxy.gate.keys import KEY
from proxy.headers import HOP, for_upstream
from proxy.home.prefix import Prompt, read_prompt
from proxy.home.session import session_of
from proxy.line.line import Lane
from proxy.loader import ModelCard
from proxy.pages import Kind, kind_of
from proxy.request_limits.check import check
from proxy.roster import find
from proxy.settings import ProxySettings

_WAIT: Final = re.compile(r"(?:^|[,;\s])wait\s*=\s*(\d{1,6})(?![\w.])", re.IGNORECASE)


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
        members: What the body says, where it is a JSON object; else empty.
        kind: What it makes an instance do.
        model: The id of the model it is for.
        client: Who asks: the name of an API key, or an address. For fairness and limits.
        lane: `interactive` goes before `batch`.
        patience_s: Seconds it may wait for its turn, at least 0.
        prompt: What is known of its prompt without the text, or None where it has none.
        session: The client's own name for the conversation, or None.
        is_hopped: Whether another proxy of this kind passed it on: it stays here.
        is_ours: Whether no client waits for it: it keeps no model from leaving.
    """

    request_id: str
    method: str
    path: str
    query: str
    headers: CIMultiDict[str]
    body: bytes
    members: Mapping[str, Any]
    kind: Kind
    model: str
    client: str
    lane: Lane
    patience_s: float
    prompt: Prompt | None = None
    session: str | None = None
    is_hopped: bool = False
    is_ours: bool = False

    @property
    def may_load(self) -> bool:
        """Return whether its model is loaded for it: what only looks at a model loads none."""
        return self.method not in {"GET", "HEAD"}

    @property
    def is_stream(self) -> bool:
        """Return whether the client asked for server-sent events."""
        return self.members.get("stream") is True


async def read_ask(
    request: web.Request, request_id: str, settings: ProxySettings, cards: Sequence[ModelCard]
) -> Ask:
    """Read a request to its end.

    Args:
        request: The request; its body not yet read.
        request_id: Its name.
        settings: The limits.
        cards: The models there are; a client that names none means the only one.

    Raises:
        BadRequest: The body is broken, is no JSON object, or leaves open which model it means.
        BodyTooLarge: The body has more bytes than the limit.
        LimitExceeded: It asks too much of an engine.
        TooSlow: The body did not come in time.
        UnknownModel: No model has the name.
    """
    body, headers = b"", for_upstream(request.headers)
    members: dict[str, Any] = {}
    key = request.get(KEY)
    is_form = request.content_type.startswith("multipart/")
    if request.method == "POST":
        body = await read_body(request, settings)
        if is_form:
            members = {"model": model_of(body)}
        else:
            members = members_of(body)
            # An engine takes only 8 KiB of what curl -d calls a form.
            headers["Content-Type"] = "application/json"
    kind = kind_of(request.method, request.path)
    pick = find(_named(members) or request.query.get("model"), cards)
    if not is_form:
        members, body = _meant(kind, members, body, pick.variant)
        check(kind, members, settings.limits)
    model = pick.card.id
    return Ask(
        request_id=request_id,
        method=request.method,
        path=request.path,
        query=request.rel_url.raw_query_string,
        headers=headers,
        body=body,
        members=members,
        kind=kind,
        model=model,
        client=key.name if key else request.remote or "",
        lane="batch" if key and key.lane == "batch" else _lane(request, members),
        patience_s=_patience_s(request, settings.patience_s),
        prompt=read_prompt(kind, model, members),
        session=session_of(request.headers, members),
        is_hopped=HOP in request.headers,
    )


def _lane(request: web.Request, members: Mapping[str, Any]) -> Lane:
    """Return `batch` for who says so, by header or in OpenAI's words for work that may wait."""
    said = request.headers.get("X-Corral-Lane", "").strip().lower()
    return "batch" if said == "batch" or members.get("service_tier") == "flex" else "interactive"


def _patience_s(request: web.Request, limit_s: float) -> float:
    """Return how long the client wants to wait, never longer than we let it.

    Source: RFC 7240 section 4.3, the preference `wait`.
    """
    if "Prefer" not in request.headers:
        return limit_s
    wanted = _WAIT.search(",".join(request.headers.getall("Prefer")))
    return min(float(wanted[1]), limit_s) if wanted else limit_s


async def read_body(request: web.Request, settings: ProxySettings) -> bytes:
    """Return the body of a request, within the limits.

    Raises:
        BadRequest: It is broken.
        BodyTooLarge: It has more bytes than the limit.
        TooSlow: It did not come in time.
    """
    max_bytes, limit_s = settings.max_body_bytes, settings.body_timeout_s
    if (request.content_length or 0) > max_bytes:
        raise BodyTooLarge(max_bytes)
    try:
        if request.content.is_eof():  # all of it came with the header, as mostly
            body = request.content.read_nowait()
        else:
            async with asyncio.timeout(limit_s):
                body = await _gathered(request.content, max_bytes)
    except TimeoutError as error:
        raise TooSlow(
            f"the body did not come within {limit_s:g} s; "
            "send it faster, or raise body_timeout_s under [proxy]"
        ) from error
    except web.RequestPayloadError as error:
        raise BadRequest(f"the body cannot be read: {_first_line(error)}") from error
    if len(body) > max_bytes:
        raise BodyTooLarge(max_bytes)
    return body


async def _gathered(content: StreamReader, max_bytes: int) -> bytes:
    """Return all there is, or the first bytes of it that are too many."""
    body = bytearray()
    async for chunk in content.iter_any():
        body += chunk
        if len(body) > max_bytes:
            break
    return bytes(body)


def _first_line(error: Exception) -> str:
    """Return what a parser says without the bytes it shows; the status is ours to say."""
    return next((line.strip() for line in str(error).splitlines()[1:] if line.strip()), str(error))


def members_of(body: bytes) -> dict[str, Any]:
    """Return what a body says.

    Raises:
        BadRequest: It is no JSON object.
    """
    try:
        members = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(members, dict):
        raise BadRequest("the body must be a JSON object")
    return members


def _meant(
    kind: Kind, members: dict[str, Any], body: bytes, variant: Variant | None
) -> tuple[dict[str, Any], bytes]:
    """Return what an instance is to read: as the variant has it, and without `id_slot`."""
    meant = members
    if variant and kind.generates:
        meant = variant.applied(members)
    if "id_slot" in meant:
        meant = {key: value for key, value in meant.items() if key != "id_slot"}
    if meant is members:
        return members, body
    try:
        return meant, orjson.dumps(meant)
    except TypeError as error:  # what can be read may lie deeper than what can be written
        raise BadRequest(f"the body cannot be passed on with what must change: {error}") from error


def _named(members: dict[str, Any]) -> str | None:
    name = members.get("model")
    if name is None or isinstance(name, str):
        return name
    raise BadRequest("the member model must be a string")
