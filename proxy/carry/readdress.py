"""A letter to a model on another machine, in that machine's own words. Pure.

A node knows the model by a name of its own, which takes the place of whatever the client called it.
The letter also says that it was passed on, so that no two proxies pass it to and fro.
"""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import parse_qsl, urlencode

import orjson

from proxy.body.form import Form
from proxy.engine.exchange import Letter
from proxy.engine.upstream import Node
from proxy.errors import BadRequest
from proxy.headers import HOP


def readdressed(letter: Letter, node: Node, form: Form | None = None) -> Letter:
    """Return a letter as a node is to read it.

    Args:
        letter: Its body, where it has one, is a form or a JSON object.
        node: Where it goes.
        form: The form that its body is.

    Raises:
        BadRequest: The body lies deeper than what can be written again.
    """
    headers = letter.headers.copy()
    headers[HOP] = "1"
    body = form.with_model(node.model).written() if form else _json(letter.body, node.model)
    is_said = bool(body) and not form
    return replace(letter, headers=headers, query=_query(letter, node, is_said=is_said), body=body)


def _json(body: bytes, model: str) -> bytes:
    if not body:
        return body
    try:
        return orjson.dumps({**orjson.loads(body), "model": model})
    except TypeError as error:
        raise BadRequest(f"the body cannot be passed on to another machine: {error}") from error


def _query(letter: Letter, node: Node, *, is_said: bool) -> str:
    """Return a query string that names the model only where the body does not."""
    pairs = parse_qsl(letter.query, keep_blank_values=True)
    others = [pair for pair in pairs if pair[0] != "model"]
    return urlencode(others if is_said else [*others, ("model", node.model)])
