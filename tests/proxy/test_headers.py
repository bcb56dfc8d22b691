"""Which header fields cross the proxy."""

import pytest
from multidict import CIMultiDict

from proxy.headers import for_client, for_upstream

CLIENTS_OWN = [
    "Authorization",
    "X-Api-Key",
    "Cookie",
    "Origin",
    "Referer",
    "Forwarded",
    "X-Forwarded-For",
    "X-Forwarded-Host",
    "X-Real-IP",
    "Sec-Fetch-Site",
    "Prefer",
    "X-Corral-Priority",
    "X-Corral-Anything",
    "X-Conversation-Id",
    "X-Session-Affinity",
    "X-Claude-Code-Session-Id",
    "session_id",
    "Content-Length",
    "Transfer-Encoding",
    "Proxy-Authorization",
    "TE",
    "Upgrade",
    "Range",
    "If-Range",
    "If-None-Match",
]


@pytest.mark.parametrize("name", CLIENTS_OWN)
def test_what_concerns_only_the_client_stays_with_us(name: str) -> None:
    assert not for_upstream(CIMultiDict({name.swapcase(): "x"}))


@pytest.mark.parametrize("name", ["anthropic-version", "anthropic-beta", "User-Agent", "Accept"])
def test_what_an_instance_may_want_is_passed(name: str) -> None:
    assert for_upstream(CIMultiDict({name: "x"})) == {name: "x"}


def test_no_more_is_passed_than_an_instance_takes() -> None:
    fields = CIMultiDict([("Accept", "x"), ("X-Long", "y" * 5000), ("y" * 5000, "")])
    assert for_upstream(fields) == {"Accept": "x"}
    many = CIMultiDict([(f"X-{number}", "y") for number in range(200)])
    assert len(for_upstream(many)) == 64


def test_what_connection_names_ends_here() -> None:
    fields = CIMultiDict([("Connection", "X-One, close"), ("Connection", "x-two")])
    for name in ("X-One", "X-Two", "X-Three"):
        fields[name] = "1"
    assert for_upstream(fields) == {"X-Three": "1"}
    assert for_client(fields) == {"X-Three": "1"}


@pytest.mark.parametrize(
    "name", ["Access-Control-Allow-Origin", "Server", "Date", "Vary", "Keep-Alive", "Trailer"]
)
def test_what_an_instance_says_of_itself_is_ours_to_say(name: str) -> None:
    assert not for_client(CIMultiDict({name: "x"}))


def test_a_stream_is_not_to_be_stored_on_its_way() -> None:
    passed = for_client(CIMultiDict({"Content-Type": "text/event-stream; charset=utf-8"}))
    assert passed["Cache-Control"] == "no-store"
    assert passed["X-Accel-Buffering"] == "no"
