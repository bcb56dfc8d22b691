"""An HTTP request as an Ask: which model, which page, which bytes.

The body is read once and never past the limits, and it is read as the engine will read it: as a
form where the page takes forms and the request says that it is one, else as JSON. `id_slot` is
taken out of it: a client that pins a slot in use corrupts another client's text (builds 10434 and
11434). For a variant of a model the body is what the variant makes of it. Any other JSON passes
byte for byte; a form is written again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import orjson
from aiohttp import web
from multidict import CIMultiDict

from proxy.auth.api_keys import KEY
from proxy.body.bodies import Share
from proxy.body.form import Form, is_form, read_form
from proxy.body.read import check_complexity, members_of, read_body
from proxy.choices import choices_of
from proxy.endpoints import EndpointKind, endpoint_kind
from proxy.errors import BadRequest
from proxy.headers import HOP, for_upstream
from proxy.models import ModelNames
from proxy.prompt_cache.prompt import Prompt, read_prompt
from proxy.prompt_cache.session_id import session_id
from proxy.request_limits.check import check
from proxy.settings import ProxySettings
from proxy.variant import Variant

Priority = Literal["interactive", "batch"]


_WAIT: Final = re.compile(r"(?:^|[,;\s])wait\s*=\s*(\d{1,6})(?![\w.])", re.IGNORECASE)
_PREFER_MAX_CHARACTERS: Final = 1024


@dataclass(frozen=True, slots=True)
class ProxyRequest:
    """What a client wants of a model.

    Attributes:
        request_id: The name of this request in logs and headers.
        method: HTTP method, upper case.
        path: Path of the page, decoded; one of the table in `app`.
        query: Query string as it was sent, without the question mark.
        headers: What of the client's header an instance may see.
        body: The bytes to pass on; empty where the method has no body.
        json: What the body says: the members of a JSON object, or the texts of a form.
        kind: What it makes an instance do.
        model: The id of the model it is for.
        client: Who asks: the name of an API key, or an address. For fairness and limits.
        priority: `interactive` goes before `batch`.
        queue_timeout_s: Seconds it may wait for its turn, at least 0.
        prompt: What is known of its prompt without the text, or None where it has none.
        session: The client's own name for the conversation, or None.
        is_from_proxy: Whether another proxy of this kind passed it on: it stays here.
        is_background: Whether no client waits for it: it keeps no model from leaving.
        form: The form that `body` is, or None: it is JSON.
        slots: That an instance uses for it, where it has as many.
        is_let_in: Whether it is a further part of a request that was let into the line: it is never
            refused for the length of the line.
    """

    request_id: str
    method: str
    path: str
    query: str
    headers: CIMultiDict[str]
    body: bytes
    json: Mapping[str, Any]
    kind: EndpointKind
    model: str
    client: str
    priority: Priority
    queue_timeout_s: float
    prompt: Prompt | None = None
    session: str | None = None
    is_from_proxy: bool = False
    is_background: bool = False
    form: Form | None = None
    is_let_in: bool = False
    slots: int = 1

    @property
    def may_load(self) -> bool:
        """Return whether its model is loaded for it: what only looks at a model loads none."""
        return self.method not in {"GET", "HEAD"}

    @property
    def is_stream(self) -> bool:
        """Return whether the client asked for server-sent events."""
        return self.json.get("stream") is True


def client_of(request: web.BaseRequest) -> str:
    """Return who asks: the name of an API key, or an address."""
    key = request[KEY]
    return key.name if key else request.remote or ""


@dataclass(frozen=True, slots=True)
class _Content:
    """What an instance is to read.

    Attributes:
        model: The id of the model that it is for.
        body: The bytes.
        members: What they say.
        prompt: What is known of the prompt, or None.
        form: The form that they are, or None.
    """

    model: str
    body: bytes = b""
    members: Mapping[str, Any] = field(default_factory=dict)
    prompt: Prompt | None = None
    form: Form | None = None


async def read_request(
    request: web.BaseRequest,
    request_id: str,
    names: ModelNames,
    share: Share,
) -> ProxyRequest:
    """Read a request to its end.

    Args:
        request: The request; its body not yet read.
        request_id: Its name.
        names: Those of the models that the client may use.
        share: The limits, and the memory that its body may take.

    Raises:
        BadRequest: The body is broken, is neither JSON object nor form, or leaves open which model
            it means.
        LimitExceeded: It asks too much of an engine.
        UnknownModel: No model has the name.
        ProxyError: As `read_body` and `check_complexity` do.
    """
    kind = endpoint_kind(request.method, request.path)
    content = await _content(request, kind, names, share)
    members, key = content.members, request[KEY]
    return ProxyRequest(
        request_id=request_id,
        method=request.method,
        path=request.path,
        query=request.rel_url.raw_query_string,
        headers=_headers(request, content.form),
        body=content.body,
        json=members,
        kind=kind,
        model=content.model,
        client=client_of(request),
        priority="batch" if key and key.priority == "batch" else _priority(request, members),
        queue_timeout_s=_queue_timeout_s(request, share.settings.queue_timeout_s),
        prompt=content.prompt,
        session=session_id(request.headers, members),
        is_from_proxy=HOP in request.headers,
        form=content.form,
        slots=choices_of(kind, members),
    )


async def _content(
    request: web.BaseRequest,
    kind: EndpointKind,
    names: ModelNames,
    share: Share,
) -> _Content:
    """Read the body, and find the model that it means."""
    named = request.query.get("model")
    if request.method != "POST":
        return _Content(names.resolve(named).model_info.id)
    body = await read_body(request, share)
    content_type = request.headers.get("Content-Type", "")
    if kind.takes_forms and is_form(content_type):
        form = await read_form(content_type, body)
        return await share.run(len(body), lambda: _of_form(form, named, names, share.settings))
    await check_complexity(body, share)
    return await share.run(len(body), lambda: _of_json(body, kind, named, names, share.settings))


def _of_form(form: Form, named: str | None, names: ModelNames, settings: ProxySettings) -> _Content:
    members = form.texts()
    check(EndpointKind.TRANSCRIPTION, members, settings.limits)
    model = names.resolve(members.get("model") or named).model_info.id
    return _Content(model, form.written(), members, form=form)


def _of_json(
    body: bytes,
    kind: EndpointKind,
    named: str | None,
    names: ModelNames,
    settings: ProxySettings,
) -> _Content:
    members = members_of(body)
    pick = names.resolve(_named(members) or named)
    members, body = _as_forwarded(kind, members, body, pick.variant)
    check(kind, members, settings.limits)
    model = pick.model_info.id
    return _Content(model, body, members, read_prompt(kind, model, members))


def _headers(request: web.BaseRequest, form: Form | None) -> CIMultiDict[str]:
    """Return what an instance may see of the header, with the type of what it is sent.

    It reads a body by its type: there is one, and it is the one that the body was read by.
    """
    headers = for_upstream(request.headers)
    if request.method == "POST":
        headers["Content-Type"] = form.content_type if form else "application/json"
    return headers


def _priority(request: web.BaseRequest, members: Mapping[str, Any]) -> Priority:
    """Return `batch` for who says so, by header or in OpenAI's words for work that may wait."""
    said = request.headers.get("X-Corral-Priority", "").strip().lower()
    return "batch" if said == "batch" or members.get("service_tier") == "flex" else "interactive"


def _queue_timeout_s(request: web.BaseRequest, limit_s: float) -> float:
    """Return how long the client wants to wait, never longer than we let it.

    Source: RFC 7240 section 4.3, the preference `wait`.
    """
    if "Prefer" not in request.headers:
        return limit_s
    said = ",".join(request.headers.getall("Prefer"))[:_PREFER_MAX_CHARACTERS]
    wanted = _WAIT.search(said)
    return min(float(wanted[1]), limit_s) if wanted else limit_s


def _as_forwarded(
    kind: EndpointKind, members: dict[str, Any], body: bytes, variant: Variant | None
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
