"""A request for a node, with its name of the model. Pure.

A header field marks it as forwarded, so that no two proxies forward it in a loop.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from urllib.parse import parse_qsl, urlencode

import orjson

from proxy.body.form import Form
from proxy.errors import BadRequest
from proxy.headers import HOP, PRIORITY
from proxy.keep_alive import MEMBER
from proxy.request import Priority
from proxy.upstream.client import UpstreamRequest
from proxy.upstream.upstream import Node


def for_node(
    upstream_request: UpstreamRequest,
    node: Node,
    form: Form | None = None,
    priority: Priority = "interactive",
    omitted: Collection[str] = (),
    keep_alive_s: float | None = None,
) -> UpstreamRequest:
    """Rewrite a request, whose body is empty, a JSON object or `form`, for a node.

    The node's own interactive requests go before a batch request from here. Of a JSON object, the
    members `omitted` are left out; another llama-corral gets `keep_alive`, and keeps its model.

    Raises:
        BadRequest: The body is nested too deeply to be serialised again.
    """
    headers = upstream_request.headers.copy()
    headers[HOP] = "1"
    if priority == "batch":
        headers[PRIORITY] = priority
    body = (
        form.with_model(node.model).written()
        if form
        else _json(upstream_request.body, _members(node, keep_alive_s), omitted)
    )
    is_said = bool(body) and not form
    return replace(
        upstream_request,
        headers=headers,
        query=_query(upstream_request, node, is_said=is_said),
        body=body,
    )


def _members(node: Node, keep_alive_s: float | None) -> dict[str, object]:
    if keep_alive_s is None or not node.takes_keep_alive:
        return {"model": node.model}
    return {"model": node.model, MEMBER: -1 if math.isinf(keep_alive_s) else keep_alive_s}


def _json(body: bytes, changed: Mapping[str, object], omitted: Collection[str]) -> bytes:
    if not body:
        return body
    members = {**orjson.loads(body), **changed}
    try:
        return orjson.dumps({name: one for name, one in members.items() if name not in omitted})
    except TypeError as error:
        raise BadRequest(f"the body cannot be forwarded to a node: {error}") from error


def _query(upstream_request: UpstreamRequest, node: Node, *, is_said: bool) -> str:
    """Return a query string that names the model only where the body does not."""
    pairs = parse_qsl(upstream_request.query, keep_blank_values=True)
    others = [pair for pair in pairs if pair[0] != "model"]
    return urlencode(others if is_said else [*others, ("model", node.model)])
