"""Machines of a local network find each other by multicast DNS, for real."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import ValidationError

from proxy.nodes.configured import Answer
from proxy.nodes.mdns import addresses_of, announce, resolve, service_info
from proxy.nodes.settings import parse_url
from proxy.settings import ProxySettings

URL = parse_url("mdns+http://_llama-corral._tcp.local")
TRIES = 10


def never(name: str, /, **fields: object) -> None:
    raise AssertionError(name, fields)


async def found(port: int, *, is_there: bool) -> Answer:
    """Ask until a service is there, or is not."""
    for _ in range(TRIES):
        answer = await resolve(URL)
        if is_there == (port in {address.port for address in answer.addresses}):
            return answer
    raise AssertionError(f"{port} is there: {not is_there}")


async def test_what_is_announced_is_found_and_its_end_is_heard() -> None:
    async with asyncio.TaskGroup() as group:
        one = group.create_task(announce("192.0.2.77", 18081, "one1234567", never))
        two = group.create_task(announce("0.0.0.0", 18082, "two1234567", never))  # noqa: S104 (all interfaces are the case)
        first = await found(18081, is_there=True)
        assert {str(found) for found in first.addresses if found.port == 18081} == {
            "192.0.2.77:18081"
        }
        assert not first.failures
        await found(18082, is_there=True)
        one.cancel()
        await found(18081, is_there=False)
        two.cancel()


def test_two_processes_of_one_machine_have_different_names() -> None:
    names = [service_info("box.lan", ["192.0.2.1"], 1, process) for process in ("aa", "bb")]
    assert [name.server for name in names] == ["box-aa.local.", "box-bb.local."]
    assert service_info("x" * 80, [], 1, "p" * 20).name.startswith("x" * 48 + "-pppppppp.")


def test_one_address_is_announced_as_it_is() -> None:
    assert addresses_of("192.0.2.1") == ["192.0.2.1"]
    every = addresses_of("0.0.0.0")  # noqa: S104 (as above)
    assert not [entry for entry in every if entry.startswith("127.") or ":" in entry]
    assert not [
        address for address in addresses_of("::") if address.startswith(("127.", "fe80", "::1"))
    ]


@pytest.mark.parametrize(
    "url", ["mdns+http://box.local", "mdns+http://_http._tcp.example", "mdns+http://192.0.2.1"]
)
def test_a_name_of_no_local_service_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"not mdns\+http|which has no records"):
        parse_url(url)


def test_a_loopback_address_is_not_announced() -> None:
    settings: dict[str, Any] = {"listen": "127.0.0.1:8080", "announce": True}
    with pytest.raises(ValidationError, match="other machines do not reach"):
        ProxySettings(**settings)
