"""Addresses to listen on, as settings write them."""

from __future__ import annotations

import ipaddress
from typing import Annotated

from pydantic import AfterValidator

from proxy.config.types import text


def _address(listen: str) -> str:
    host, separator, port = listen.rpartition(":")
    is_number = port.isascii() and port.isdecimal() and len(port) <= len("65535")
    if not (host and separator and is_number and int(port) <= 65535):
        raise ValueError("not HOST:PORT")
    if any(one.isspace() for one in text(host)):
        raise ValueError("not HOST:PORT: a space in the host")
    host.strip("[]").encode("idna")  # as the system does; raises ValueError where it cannot
    return listen


Address = Annotated[str, AfterValidator(_address)]


def host_of(address: str) -> str:
    """The host of HOST:PORT, an IPv6 one without brackets."""
    return address.rpartition(":")[0].strip("[]")


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address to listen on."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
