"""Finds the machines of a service in the local network, by multicast DNS.

Source: RFC 6762 and RFC 6763; python-zeroconf, `zeroconf.asyncio`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from zeroconf import Error, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from proxy.nodes.addresses import ADDRESSES_MAX, Answer, NodeAddress
from proxy.nodes.url import NodeUrl

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

# Answers come within 120 ms, and a second question follows after one second.
# Source: RFC 6762, sections 5.2 and 6.
_LISTEN_S: Final = 2.0
_INFO_S: Final = 2.0
_TTL_S: Final = 10.0


async def resolve(url: NodeUrl) -> Answer:
    """Ask for the services of a url's type."""
    service = f"{url.host.rstrip('.')}."
    try:
        async with multicast() as zeroconf:
            found = await _services(zeroconf, service)
    except (Error, OSError) as error:
        return Answer(failures={service: f"multicast DNS cannot be used: {error}"})
    addresses = [address for info in found for address in _addresses(info, service)]
    return Answer(addresses[:ADDRESSES_MAX], _TTL_S)


@asynccontextmanager
async def multicast() -> AsyncIterator[AsyncZeroconf]:
    """Raises OSError where no interface can be used."""
    zeroconf = AsyncZeroconf()
    try:
        yield zeroconf
    finally:
        await zeroconf.async_close()


async def _services(zeroconf: AsyncZeroconf, service: str) -> list[AsyncServiceInfo]:
    names: set[str] = set()

    def note(
        zeroconf: Zeroconf,  # noqa: ARG001 (zeroconf names the parameters)
        service_type: str,  # noqa: ARG001 (as above)
        name: str,
        state_change: ServiceStateChange,
    ) -> None:
        if state_change is ServiceStateChange.Removed:
            names.discard(name)
        elif len(names) < ADDRESSES_MAX:
            names.add(name)

    browser = AsyncServiceBrowser(zeroconf.zeroconf, service, handlers=[note])
    await asyncio.sleep(_LISTEN_S)
    await browser.async_cancel()
    infos = [AsyncServiceInfo(service, name) for name in sorted(names)]
    async with asyncio.TaskGroup() as group:
        asked = [
            (info, group.create_task(info.async_request(zeroconf.zeroconf, _INFO_S * 1000)))
            for info in infos
        ]
    return [info for info, task in asked if task.result()]


def _addresses(info: AsyncServiceInfo, service: str) -> Iterator[NodeAddress]:
    """Yield where a service is; a link-local IPv6 address means nothing without its interface."""
    for host in info.parsed_addresses():
        if not host.lower().startswith("fe80:"):
            yield NodeAddress(
                host=host,
                port=info.port or 0,
                hostname=(info.server or "").rstrip("."),
                questions=(service,),
                has_own_port=True,
            )
