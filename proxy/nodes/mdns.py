"""Multicast DNS: finds the machines of a service, and announces this one. Imported only if needed.

Source: RFC 6762 and RFC 6763; python-zeroconf, `zeroconf.asyncio`.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterator, Sequence
from typing import Final

import ifaddr
from zeroconf import Error, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from proxy.nodes.configured import ADDRESSES_MAX, Answer, NodeAddress
from proxy.nodes.settings import NodeUrl
from proxy.observe.record import Emit

# Answers come within 120 ms, and a second question follows after one second.
# Source: RFC 6762, sections 5.2 and 6.
_LISTEN_S: Final = 2.0
_INFO_S: Final = 2.0
_TTL_S: Final = 10.0


async def resolve(url: NodeUrl) -> Answer:
    service = f"{url.host.rstrip('.')}."
    try:
        async with AsyncZeroconf() as zeroconf:
            found = await _services(zeroconf, service)
    except (Error, OSError) as error:
        return Answer(failures={service: f"multicast DNS cannot be used: {error}"})
    addresses = [address for info in found for address in _addresses(info, service)]
    return Answer(addresses[:ADDRESSES_MAX], _TTL_S)


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
    """Yield a service's addresses; link-local IPv6 addresses are useless without the interface."""
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
_ALL_IPV4: Final = "0.0.0.0"  # noqa: S104 (users listen on it)
_LABEL_MAX_CHARACTERS: Final = 48  # of 63, with the process behind it


async def announce(host: str, port: int, process: str, emit: Emit) -> None:
    """Announce a listening address until cancelled; then withdraw the announcement."""
    info = service_info(socket.gethostname(), addresses_of(host), port, process)
    try:
        async with AsyncZeroconf() as zeroconf:
            await zeroconf.async_register_service(info)
            await asyncio.get_running_loop().create_future()  # until cancelled
    except (Error, OSError) as error:
        emit("node.not_announced", reason=f"multicast DNS cannot be used: {error}")


def service_info(
    hostname: str, addresses: Sequence[str], port: int, process: str
) -> AsyncServiceInfo:
    """Return the announcement of a process; processes of one machine get different names."""
    label = f"{hostname.partition('.')[0][:_LABEL_MAX_CHARACTERS] or 'machine'}-{process[:8]}"
    return AsyncServiceInfo(
        SERVICE,
        f"{label}.{SERVICE}",
        port=port,
        server=f"{label}.local.",
        parsed_addresses=list(addresses),
    )


def addresses_of(host: str) -> list[str]:
    """Return the addresses at which others reach a listener; 0.0.0.0 listens only on IPv4."""
    try:
        if not ipaddress.ip_address(host).is_unspecified:
            return [host]
    except ValueError:
        pass  # a name: all interfaces
    found = (
        ip.ip if isinstance(ip.ip, str) else ip.ip[0]
        for adapter in ifaddr.get_adapters()
        for ip in adapter.ips
    )
    addresses = {address: ipaddress.ip_address(address) for address in found}
    return sorted(
        address
        for address, parsed in addresses.items()
        if (parsed.version == 4 or host != _ALL_IPV4)
        and not (parsed.is_loopback or parsed.is_link_local)
    )
