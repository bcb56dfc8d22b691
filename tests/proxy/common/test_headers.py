"""Which header fields cross the proxy."""

import pytest
from multidict import CIMultiDict

from proxy.common.headers import JSON, for_client, for_upstream

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


def test_two_fields_of_an_instance_reach_a_client_and_no_other() -> None:
    passed = {"Content-Length": "3", "Retry-After": "1"}
    hostile = (
        "Content-Encoding",
        *("Set-Cookie", "Clear-Site-Data", "Refresh", "Location", "Link", "Content-Location"),
        *("Access-Control-Allow-Origin", "Content-Security-Policy", "Service-Worker-Allowed"),
        *("Server", "Date", "Vary", "Keep-Alive", "Trailer", "X-Corral-Draining", "X-Anything"),
    )
    fields = CIMultiDict({**passed, **dict.fromkeys(hostile, "x")})
    assert for_client(fields) == {**passed, "Content-Type": JSON}


@pytest.mark.parametrize("given", ["text/html", "application/json; charset=utf-7", "image/svg+xml"])
def test_what_is_no_stream_is_json(given: str) -> None:
    assert for_client(CIMultiDict({"Content-Type": given})) == {"Content-Type": JSON}


def test_a_stream_is_not_to_be_stored_on_its_way() -> None:
    passed = for_client(CIMultiDict({"Content-Type": "text/event-stream; charset=utf-8"}))
    assert passed["Cache-Control"] == "no-store"
    assert passed["X-Accel-Buffering"] == "no"


def test_a_stream_has_no_length_because_its_events_may_be_rewritten() -> None:
    fields = CIMultiDict({"Content-Type": "text/event-stream", "Content-Length": "3"})
    assert "Content-Length" not in for_client(fields)
