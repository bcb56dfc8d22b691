"""The records of a name, and each way in which a name server can fail."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from dns.rcode import Rcode
from support.dns_server import FakeDns

from proxy.nodes.configured import ADDRESSES_MAX, Answer
from proxy.nodes.dns_resolver import resolve
from proxy.nodes.settings import parse_name_server, parse_url


@pytest.fixture
async def names() -> AsyncIterator[FakeDns]:
    async with FakeDns(ttl_s=30).running() as names:
        yield names


async def ask(
    names: FakeDns, url: str = "dns+http://corral.test:8080", timeout_s: float = 5.0
) -> Answer:
    return await resolve(parse_url(url), parse_name_server(names.address), timeout_s)


def found(answer: Answer) -> list[tuple[str, int, str]]:
    return sorted((address.host, address.port, address.hostname) for address in answer.addresses)


async def test_a_name_has_addresses_of_both_kinds(names: FakeDns) -> None:
    names.records = {"A corral.test": ["10.0.0.1", "10.0.0.2"], "AAAA corral.test": ["fd00::1"]}
    answer = await ask(names)
    assert found(answer) == [
        ("10.0.0.1", 8080, "corral.test"),
        ("10.0.0.2", 8080, "corral.test"),
        ("fd00::1", 8080, "corral.test"),
    ]
    assert (answer.ttl_s, answer.failures) == (30, {})


async def test_services_have_ports_and_certificates_of_their_targets(names: FakeDns) -> None:
    names.records = {
        "SRV _http._tcp.corral.test": [
            "0 0 8081 one.test.",
            "0 0 8082 two.test.",
            "9 0 8083 backup.test.",
        ],
        "A one.test": ["10.0.0.1"],
        "A two.test": ["10.0.0.2"],
        "A backup.test": ["10.0.0.3"],
    }
    answer = await ask(names, "dns+https://_http._tcp.corral.test")
    assert found(answer) == [("10.0.0.1", 8081, "one.test"), ("10.0.0.2", 8082, "two.test")]
    names.failing = {"A one.test"}
    answer = await ask(names, "dns+https://_http._tcp.corral.test")
    assert found(answer) == [("10.0.0.2", 8082, "two.test")]
    assert list(answer.failures) == ["A one.test"]
    names.failing = {"SRV _http._tcp.corral.test"}
    assert list((await ask(names, "dns+http://_http._tcp.corral.test")).failures) == [
        "SRV _http._tcp.corral.test"
    ]


async def test_a_target_that_is_the_root_says_that_there_is_no_service(names: FakeDns) -> None:
    names.records = {"SRV _http._tcp.corral.test": ["0 0 0 ."]}
    assert await ask(names, "dns+http://_http._tcp.corral.test") == Answer((), 30, {})


@pytest.mark.parametrize("missing", [Rcode.NXDOMAIN, Rcode.NOERROR])
async def test_a_name_without_records_has_no_addresses(names: FakeDns, missing: Rcode) -> None:
    names.missing = missing
    assert await ask(names) == Answer()


async def test_a_server_that_fails_has_not_answered(names: FakeDns) -> None:
    names.records = {"A corral.test": ["10.0.0.1"]}
    names.failing = {"A corral.test", "AAAA corral.test"}
    answer = await ask(names)
    assert not answer.addresses
    assert "A corral.test: the name server fails: SERVFAIL" in answer.failures.values()


async def test_a_silent_server_has_not_answered(names: FakeDns) -> None:
    names.silent = True
    answer = await ask(names, timeout_s=0.2)
    assert answer.failures["A corral.test"] == "A corral.test: no name server answers"


async def test_a_server_that_is_not_there_has_not_answered() -> None:
    gone = FakeDns()
    async with gone.running():
        pass
    assert list((await ask(gone, timeout_s=0.2)).failures) == ["A corral.test", "AAAA corral.test"]


async def test_many_addresses_come_by_tcp(names: FakeDns) -> None:
    many = [f"10.1.{at // 256}.{at % 256}" for at in range(ADDRESSES_MAX)]
    names.records, names.truncates = {"A corral.test": many}, True
    assert len((await ask(names)).addresses) == ADDRESSES_MAX
