"""Lets another model answer a chat whose own model cannot be served: the next of its `fallback`.

Only chats fall back: a raw prompt is written in the template or the tokens of its model, and
vectors, ranks and token counts of two models cannot be compared. Only the list of the model that
the client named counts, so two models may name each other. A request that another proxy forwarded
does not fall back: the proxy that has the client decides.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from proxy.common.headers import FALLBACK
from proxy.forward.response import ClientResponse
from proxy.http.body import Share
from proxy.request.models import ModelNames
from proxy.request.request import ProxyRequest, encode_members, json_content
from proxy.request.variants import MEMBER
from proxy.settings import ProxySettings
from proxy.upstream.endpoint_kinds import EndpointKind, choices_of

_CHATS: Final = frozenset({EndpointKind.CHAT, EndpointKind.MESSAGES, EndpointKind.RESPONSES})


def other_requests(
    request: ProxyRequest, names: ModelNames, share: Share, answer: ClientResponse
) -> Iterator[Awaitable[ProxyRequest]]:
    """Yield the request for each model that may answer instead; awaiting it raises BadRequest."""
    for name in fallbacks(request, names):
        answer.note_fallback(request.model)
        other = functools.partial(for_model, request, name, names, share.settings)
        yield share.run(len(request.body), other)


def is_refused(headers: Mapping[str, str]) -> bool:
    return headers.get(FALLBACK, "").strip().lower() == "none"


def fallbacks(request: ProxyRequest, names: ModelNames) -> list[str]:
    """Return the names to try that the client may use; each model once."""
    asked = names.get(request.model)
    if asked is None or request.is_from_proxy or request.kind not in _CHATS:
        return []
    found: dict[str, str] = {}
    for name in asked.model_info.fallback:
        if other := names.get(name):
            found.setdefault(other.model_info.id, name)
    found.pop(request.model, None)
    return list(found.values())


def for_model(
    request: ProxyRequest, name: str, names: ModelNames, settings: ProxySettings
) -> ProxyRequest:
    """Return a request for the model or variant called `name`; raises BadRequest.

    Changes that a variant of the first model made to the request remain.
    """
    members = {**request.json, "model": name}
    if request.adapter is not None:  # it belongs to the first model
        members.pop(MEMBER)
    body = encode_members(members)
    content = json_content(body, request.kind, None, names, settings, request.owner)
    return replace(
        request,
        model=content.model,
        body=content.body,
        json=content.members,
        prompt=content.prompt,
        slots=choices_of(request.kind, content.members),
        remote_variant=content.remote_variant,
        adapter=content.adapter,
        keep_alive_s=content.keep_alive_s,
    )
