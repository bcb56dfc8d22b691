"""Urls of nodes, and addresses of name servers."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import ValidationError

from proxy.nodes.settings import NodeSettings, NodeUrl, normalized, parse_name_server, parse_url


def url_of(
    discovery: Literal["dns", "file"] | None, flags: str, host: str, port: int, prefix: str
) -> NodeUrl:
    return NodeUrl(discovery, "tls" in flags, "srv" in flags, host, port, prefix)


@pytest.mark.parametrize(
    ("url", "parsed"),
    [
        ("http://a:1/x", url_of(None, "", "a", 1, "/x")),
        ("https://[::1]", url_of(None, "tls", "::1", 443, "")),
        ("dns+http://corral.default.svc", url_of("dns", "", "corral.default.svc", 80, "")),
        ("dns+https://corral:8443/api", url_of("dns", "tls", "corral", 8443, "/api")),
        ("dns+http://_http._tcp.corral", url_of("dns", "srv", "_http._tcp.corral", 80, "")),
        ("file+https:///shared/*.json", url_of("file", "tls", "/shared/*.json", 443, "")),
    ],
)
def test_a_url_says_where_addresses_come_from(url: str, parsed: NodeUrl) -> None:
    assert parse_url(url) == parsed
    assert normalized(f"{url}/v1/") == url


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("ftp://a", "not http://HOST:PORT"),
        ("ftp+http://a", "nor dns"),
        ("dns+http://", "not http://HOST:PORT"),
        ("dns+http://10.0.0.1:8080", "an address, which has no records"),
        ("dns+http://_http._tcp.corral:80", "comes from the SRV records"),
        ("dns+http://key@corral", "belongs into key_file"),
        ("http://a:0", "not a port"),
        ("file+http://nodes.d/*.json", "three slashes"),
        ("file+http:///nodes*/a.json", "three slashes"),
    ],
)
def test_other_urls_are_rejected_with_the_reason(url: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        normalized(url)


def test_a_name_server_is_an_address_with_or_without_a_port() -> None:
    assert parse_name_server("10.96.0.10") == ("10.96.0.10", 53)
    assert parse_name_server("127.0.0.1:5353") == ("127.0.0.1", 5353)
    assert parse_name_server("fd00::a") == ("fd00::a", 53)
    assert parse_name_server("[fd00::a]:5353") == ("fd00::a", 5353)
    for wrong in ("dns.example", "", "10.0.0.1:53/x"):
        with pytest.raises(ValueError, match="not the address of a name server"):
            parse_name_server(wrong)


def test_requests_wait_only_for_the_models_of_the_settings() -> None:
    with pytest.raises(ValidationError, match="list them in models"):
        NodeSettings(url="http://a", on_demand=True)
    assert NodeSettings(url="http://a", models=("chat",), on_demand=True).on_demand
