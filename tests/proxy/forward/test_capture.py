"""An observer gets the client's bytes."""

from __future__ import annotations

from typing import Any

from support.proxy_harness import ProxyHarness
from support.upstream import Call

from proxy.forward.inspection import Exchange
from proxy.observe.record import AccessRecord
from proxy.request.request import ProxyRequest


class _Seen:
    def __init__(self) -> None:
        self.body = b""
        self.facts: list[Any] = []

    def begin(self, status: int, content_type: str, /) -> None:
        self.facts.append((status, content_type.partition(";")[0]))

    def add(self, chunk: bytes, /) -> None:
        self.body += chunk

    def end(self, record: AccessRecord, failure: BaseException | None, /) -> None:
        self.facts.append((record.instance, failure))


class _Observer:
    def __init__(self) -> None:
        self.seen: list[_Seen] = []

    def observe(self, request: ProxyRequest, /) -> Exchange | None:
        assert request.model == "chat"
        self.seen.append(_Seen())
        return self.seen[-1]


STREAM = b"""data: {"choices": [{"index": 0, "finish_reason": null, "delta": {"content": "hi"}}]}

data: {"choices": [{"index": 0, "finish_reason": "stop", "delta": {}}]}

data: [DONE]

"""


async def say_hi(call: Call) -> None:
    await call.begin_stream()
    await call.chunk(STREAM)
    await call.end()


async def test_an_observer_gets_the_clients_bytes(proxy: ProxyHarness) -> None:
    await proxy.open()
    await proxy.fake(say_hi)
    observer = _Observer()
    got = []
    with proxy.capture.attach(observer.observe):
        for is_stream in (False, True):
            async with proxy.ask(stream=is_stream) as response:
                got.append(await response.read())
    await proxy.send()
    assert [entry.body for entry in observer.seen] == got
    whole, stream = (entry.facts for entry in observer.seen)
    assert whole == [(200, "application/json"), ("chat.1", None)]
    assert stream[-1] == ("chat.1", None)
    assert (200, "text/event-stream") in stream
