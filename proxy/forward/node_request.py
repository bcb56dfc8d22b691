"""Rewrites a request for a node: its own name of the model, and a header that marks the request.

A forwarded request is marked so that no two proxies forward it in a loop.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Final
from urllib.parse import parse_qsl, urlencode

import orjson

from proxy.common.headers import CACHE_OWNER, HOP, PRIORITY
from proxy.http.forms import Form
from proxy.request import variants
from proxy.request.models import variant_end
from proxy.request.request import KEEP_ALIVE, Priority, ProxyRequest, encode_members
from proxy.upstream.client import UpstreamRequest
from proxy.upstream.upstream import Node

_LARGE_BYTES: Final = 1024**2


async def readdress(
    upstream_request: UpstreamRequest, node: Node, request: ProxyRequest
) -> UpstreamRequest:
    """Rewrite a request for a node, and for the variant or adapter that it names.

    A body of more than 1 MiB is rewritten in a thread.
    """
    if request.remote_variant:
        node = replace(node, model=node.model + variant_end(request.remote_variant))
    elif request.adapter:
        node = replace(node, model=f"{node.model}{variants.MARK}{request.adapter}")
    if request.owner.is_alone and node.takes_keep_alive:  # another llama-corral
        upstream_request.headers[CACHE_OWNER] = request.owner.digest
    # The ids of adapters are those of this machine.
    omitted = () if request.adapter is None else (variants.MEMBER,)
    options = node, request.form, request.priority, omitted, request.keep_alive_s
    rewrite = functools.partial(for_node, upstream_request, *options)
    if len(upstream_request.body) <= _LARGE_BYTES:
        return rewrite()
    return await asyncio.to_thread(rewrite)


def for_node(
    upstream_request: UpstreamRequest,
    node: Node,
    form: Form | None = None,
    priority: Priority = "interactive",
    omitted: Collection[str] = (),
    keep_alive_s: float | None = None,
) -> UpstreamRequest:
    """Rewrite a request, whose body is empty, a JSON object or `form`, for a node.

    A batch request from here queues behind the node's own interactive requests. The members
    `omitted` are left out of a JSON object. Another llama-corral gets `keep_alive`, so it keeps its
    model loaded for as long. Raises BadRequest: the body is nested too deeply to be serialised
    again.
    """
    headers = upstream_request.headers.copy()
    headers[HOP] = "1"
    if priority == "batch":
        headers[PRIORITY] = priority
    if form:
        body = form.with_model(node.model).encode()
    else:
        changes: dict[str, object] = {"model": node.model}
        if keep_alive_s is not None and node.takes_keep_alive:
            changes[KEEP_ALIVE] = -1 if math.isinf(keep_alive_s) else keep_alive_s
        body = _encode_json(upstream_request.body, changes, omitted)
    pairs = parse_qsl(upstream_request.query, keep_blank_values=True)
    query = [pair for pair in pairs if pair[0] != "model"]
    if form or not body:  # the body does not name the model
        query.append(("model", node.model))
    return replace(upstream_request, headers=headers, query=urlencode(query), body=body)


def _encode_json(body: bytes, changes: Mapping[str, object], omitted: Collection[str]) -> bytes:
    if not body:
        return body
    members = {**orjson.loads(body), **changes}
    return encode_members({name: value for name, value in members.items() if name not in omitted})
