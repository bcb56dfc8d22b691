"""Tells the local network of this llama-corral, by multicast DNS, until cancelled."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from typing import Final

import ifaddr
from zeroconf import Error
from zeroconf.asyncio import AsyncServiceInfo

from proxy.access_log import Emit
from proxy.nodes.mdns_resolver import multicast

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
    return sorted({one for one in found if _is_reachable(one, within=host)})


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
