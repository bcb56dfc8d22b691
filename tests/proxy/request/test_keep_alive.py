"""How long a request wants its model to stay loaded."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import aiohttp
import orjson
import pytest
from support.proxy_harness import CHAT, ProxyHarness, model_info
from support.requests import ask, upstream

from proxy.errors import BadRequest
from proxy.request.request import keep_alive_s
from proxy.request.variants import Variant
from proxy.upstream.upstream import Node


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (0, 0),
        (0.5, 0.5),
        (300, 300),
        (-1, math.inf),
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("1h15m30.918s", 4530.918),
        ("300ms", 0.3),
        ("10µs", 1e-5),
        ("+2s", 2),
        ("0", 0),
        ("0s", 0),
        ("-1", math.inf),
        ("-1m", math.inf),
        ("600", 600),
        (" 5m ", 300),
    ],
)
def test_the_forms_of_ollama(value: Any, expected: float | None) -> None:
    found = keep_alive_s({"keep_alive": value})
    assert found == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    "value",
    [True, False, "", "m", "5 m", "5d", "5m5", "forever", "1e3", "٣s", "--1", [], {}, "9" * 65],
)
def test_other_values_are_bad_requests(value: Any) -> None:
    with pytest.raises(BadRequest, match='such as "5m"'):
        keep_alive_s({"keep_alive": value})


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "hello"}),
        ("/completion", {"prompt": "hello"}),
        ("/v1/messages", CHAT),
        ("/v1/responses", {"input": "hello"}),
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
        ("/v1/embeddings", {"input": "hello"}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ],
)
async def test_an_engine_never_sees_it(
    proxy: ProxyHarness, path: str, body: dict[str, Any]
) -> None:
    fake = await proxy.fake()
    asked = {"model": "chat", "stream": False, **body, "keep_alive": "2m"}
    async with proxy.http.post(path, json=asked) as response:
        assert response.status == 200, await response.text()
    assert "keep_alive" not in orjson.loads((await fake.calls.get()).body)
    assert set(proxy.keep_alives.given) == {("chat", 120.0)}


async def test_a_form_may_have_it(proxy: ProxyHarness) -> None:
    fake = await proxy.fake()
    form = aiohttp.FormData({"model": "chat", "keep_alive": "2m"})
    form.add_field("file", b"RIFF", filename="a.wav", content_type="audio/wav")
    async with proxy.http.post("/v1/audio/transcriptions", data=form) as response:
        assert response.status == 200
    assert b"keep_alive" not in (await fake.calls.get()).body
    assert proxy.keep_alives.given == [("chat", 120.0)]


async def test_a_malformed_value_is_refused_before_a_slot_is_taken(proxy: ProxyHarness) -> None:
    fake = await proxy.fake()
    async with proxy.ask(keep_alive="soon") as response:
        assert response.status == 400
        assert '"1h30m"' in (await response.json())["error"]["message"]
    assert fake.calls.empty()
    assert not proxy.keep_alives.given


async def test_a_variant_may_set_it(proxy: ProxyHarness) -> None:
    await proxy.fake()
    short, strict = Variant.model_validate({"keep_alive": 5}), Variant(strip=("keep_alive",))
    variants = {"short": short, "strict": strict}
    proxy.loader.model_infos = [replace(model_info("chat"), variants=variants)]
    for members in ({"model": "chat:short"}, {"model": "chat:strict", "keep_alive": 60}):
        async with proxy.ask(**members) as response:
            assert response.status == 200
    assert proxy.keep_alives.given == [("chat", 5.0)]


async def test_a_request_that_a_node_answers_says_nothing_of_a_model_here(
    proxy: ProxyHarness,
) -> None:
    proxy.router.admit(replace(upstream("far"), node=Node("far", "chat")))
    async with proxy.router.lease(replace(ask("hello"), keep_alive_s=0.0)):
        assert not proxy.keep_alives.given
