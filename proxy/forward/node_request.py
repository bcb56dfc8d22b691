"""A request as another machine takes it: with its name of the model. Pure.

A node knows the model by a name of its own, which takes the place of whatever the client called it.
A header field marks it as forwarded, so that no two proxies forward it in a loop.
"""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import parse_qsl, urlencode

import orjson

from proxy.body.form import Form
from proxy.errors import BadRequest
from proxy.headers import HOP
from proxy.upstream.client import UpstreamRequest
from proxy.upstream.upstream import Node


def for_node(
    upstream_request: UpstreamRequest, node: Node, form: Form | None = None
) -> UpstreamRequest:
    """Rewrite a request for a node.

    Args:
        upstream_request: Its body, where it has one, is a form or a JSON object.
        node: Where it goes.
        form: The form that its body is.

    Raises:
        BadRequest: The body lies deeper than what can be written again.
    """
    headers = upstream_request.headers.copy()
    headers[HOP] = "1"
    body = (
        form.with_model(node.model).written() if form else _json(upstream_request.body, node.model)
    )
    is_said = bool(body) and not form
    return replace(
        upstream_request,
        headers=headers,
        query=_query(upstream_request, node, is_said=is_said),
        body=body,
    )


def _json(body: bytes, model: str) -> bytes:
    if not body:
        return body
    try:
        return orjson.dumps({**orjson.loads(body), "model": model})
    except TypeError as error:
        raise BadRequest(f"the body cannot be passed on to another machine: {error}") from error


def _query(upstream_request: UpstreamRequest, node: Node, *, is_said: bool) -> str:
    """Return a query string that names the model only where the body does not."""
    pairs = parse_qsl(upstream_request.query, keep_blank_values=True)
    others = [pair for pair in pairs if pair[0] != "model"]
    return urlencode(others if is_said else [*others, ("model", node.model)])
