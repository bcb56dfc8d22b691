"""A letter as a node is to read it."""

from __future__ import annotations

import orjson
import pytest
from multidict import CIMultiDict

from proxy.errors import BadRequest
from proxy.forward.forward import for_node
from proxy.http.forms import Form, Part
from proxy.upstream.client import UpstreamRequest
from proxy.upstream.upstream import Node

NODE = Node("far", "their name")
JSON = CIMultiDict({"Content-Type": "application/json"})


def upstream_request(body: bytes = b"", query: str = "", method: str = "POST") -> UpstreamRequest:
    return UpstreamRequest(method, "/v1/chat/completions", query, JSON, body)


def test_the_body_names_the_model_as_the_node_does_and_keeps_the_rest() -> None:
    sent = for_node(upstream_request(b'{"model": "chat:high", "n": 1}', "a=1&model=chat&b"), NODE)
    assert orjson.loads(sent.body) == {"model": "their name", "n": 1}
    assert sent.query == "a=1&b="


def test_without_a_body_the_query_names_it() -> None:
    assert (
        for_node(upstream_request(query="model=chat", method="GET"), NODE).query
        == "model=their+name"
    )


def test_a_form_is_changed_in_its_field_alone() -> None:
    form = Form((Part("model", b"chat"), Part("file", b"chat", "a.wav")))
    headers = CIMultiDict({"Content-Type": form.content_type})
    asked = UpstreamRequest("POST", "/v1/audio/transcriptions", "", headers, form.encode())
    sent = for_node(asked, NODE, form)
    assert sent.body == form.encode().replace(b"chat", b"their name", 1)


def test_it_says_that_it_was_passed_on_and_leaves_the_first_upstream_request_alone() -> None:
    assert for_node(upstream_request(), NODE).headers["X-Corral-Hop"] == "1"
    assert "X-Corral-Hop" not in JSON


def test_a_body_too_deep_to_be_written_again_is_the_clients_fault() -> None:
    deep = b'{"a": ' + b"[" * 900 + b"]" * 900 + b"}"
    with pytest.raises(BadRequest, match="serialised again"):
        for_node(upstream_request(deep), NODE)


def test_a_batch_request_is_one_there_too() -> None:
    assert "X-Corral-Priority" not in for_node(upstream_request(), NODE).headers
    sent = for_node(upstream_request(), NODE, priority="batch")
    assert sent.headers["X-Corral-Priority"] == "batch"
