"""Multicast DNS: finds the machines of a service, and announces this one. Imported only where used.

Source: RFC 6762 and RFC 6763; python-zeroconf, `zeroconf.asyncio`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import ifaddr
from zeroconf import Error, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from proxy.nodes.configured import ADDRESSES_MAX, Answer, NodeAddress
from proxy.nodes.settings import NodeUrl
from proxy.observe.record import Emit

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


SERVICE: Final = "_llama-corral._tcp.local."
_ALL_IPV4: Final = "0.0.0.0"  # noqa: S104 (what users listen on)
_IPV4: Final = 4
_LABEL_MAX_CHARACTERS: Final = 48  # of 63, with the process behind it


async def announce(host: str, port: int, process: str, emit: Emit) -> None:
    """Announce an address that listens; the network hears of the end when this is cancelled."""
    info = service_info(socket.gethostname(), addresses_of(host), port, process)
    try:
        async with multicast() as zeroconf:
            await zeroconf.async_register_service(info)
            await asyncio.get_running_loop().create_future()  # until cancelled
    except (Error, OSError) as error:
        emit("node.not_announced", reason=f"multicast DNS cannot be used: {error}")


def service_info(
    hostname: str, addresses: Sequence[str], port: int, process: str
) -> AsyncServiceInfo:
    """Return what is announced; two processes of one machine have names of their own."""
    label = f"{hostname.partition('.')[0][:_LABEL_MAX_CHARACTERS] or 'machine'}-{process[:8]}"
    return AsyncServiceInfo(
        SERVICE,
        f"{label}.{SERVICE}",
        port=port,
        server=f"{label}.local.",
        parsed_addresses=list(addresses),
    )


def addresses_of(host: str) -> list[str]:
    """Return the addresses at which others reach a listener: one, or those of all interfaces."""
    if _is_one_address(host):
        return [host]
    found = (
        ip.ip if isinstance(ip.ip, str) else ip.ip[0]
        for adapter in ifaddr.get_adapters()
        for ip in adapter.ips
    )
    return sorted({address for address in found if _is_reachable(address, within=host)})


def _is_one_address(host: str) -> bool:
    try:
        return not ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return False


def _is_reachable(address: str, *, within: str) -> bool:
    """Whether others reach an address of an interface; 0.0.0.0 listens on IPv4 alone."""
    found = ipaddress.ip_address(address)
    is_heard = found.version == _IPV4 or within != _ALL_IPV4
    return is_heard and not (found.is_loopback or found.is_link_local)
