"""The url of a node: one machine, or a name with as many machines as it has records. Pure."""

from __future__ import annotations

import functools
import ipaddress
from dataclasses import dataclass
from typing import Final, Literal
from urllib.parse import SplitResult, urlsplit

Discovery = Literal["dns", "mdns"]

_PORTS: Final = {"http": 80, "https": 443}
_DNS_PORT: Final = 53


@dataclass(frozen=True, slots=True)
class NodeUrl:
    """A parsed url.

    Attributes:
        discovery: Where the addresses come from; None: the host is one machine.
        is_service: Whether the host names SRV records, which have the ports.
        port: That of the url, or of its scheme.
        prefix: Before every path: empty or `/something`.
    """

    discovery: Discovery | None
    is_tls: bool
    is_service: bool
    host: str
    port: int
    prefix: str


@dataclass(frozen=True, slots=True)
class NameServer:
    host: str
    port: int = _DNS_PORT


def normalized(url: str) -> str:
    """Return a node's base URL without a trailing `/v1`, which clients add; raises ValueError."""
    shown = url.rstrip("/").removesuffix("/v1").rstrip("/")
    parse_url(shown)
    if not url.isprintable():
        raise ValueError("more than an address; a key belongs into key_file")
    return shown


@functools.lru_cache(maxsize=1024)
def parse_url(url: str) -> NodeUrl:
    """Raises ValueError."""
    parts = urlsplit(url)
    *discoveries, scheme = parts.scheme.split("+", 1)
    discovery = _discovery(discoveries)
    if scheme not in _PORTS or not parts.hostname:
        raise ValueError("not http://HOST:PORT or https://HOST:PORT, nor dns+ or mdns+ before it")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("more than an address; a key belongs into key_file")
    if parts.port == 0:  # reading `port` rejects other invalid ones
        raise ValueError("not a port")
    if discovery:
        _check_name(parts)
    if discovery == "mdns" and not _is_local_service(parts.hostname):
        raise ValueError("not mdns+http://_llama-corral._tcp.local, or another service of .local")
    return NodeUrl(
        discovery=discovery,
        is_tls=scheme == "https",
        is_service=_is_service(parts.hostname),
        host=parts.hostname,
        port=parts.port or _PORTS[scheme],
        prefix=parts.path,
    )


def parse_name_server(text: str) -> NameServer:
    """Read `ADDRESS`, `ADDRESS:PORT` or `[ADDRESS]:PORT`; raises ValueError."""
    try:
        return NameServer(str(ipaddress.ip_address(text)))
    except ValueError:
        parts = urlsplit(f"//{text}")
    if parts.netloc != text or "@" in text or not _is_address(parts.hostname or ""):
        raise ValueError("not the address of a name server, as 10.96.0.10 or 127.0.0.1:5353")
    return NameServer(str(ipaddress.ip_address(parts.hostname or "")), parts.port or _DNS_PORT)


def _discovery(prefixes: list[str]) -> Discovery | None:
    match prefixes:
        case []:
            return None
        case ["dns"]:
            return "dns"
        case ["mdns"]:
            return "mdns"
    raise ValueError("not http:// or https://, nor dns+ or mdns+ before it")


def _check_name(parts: SplitResult) -> None:
    host = parts.hostname or ""
    if _is_address(host):
        raise ValueError(f"{host} is an address, which has no records; write it without dns+")
    if _is_service(host) and parts.port:
        raise ValueError("a port, which comes from the SRV records; leave it out")


def _is_service(host: str) -> bool:
    """Return whether a name is one of SRV records. Source: RFC 2782, `_Service._Proto.Name`."""
    labels = host.split(".")
    return len(labels) > 2 and all(label.startswith("_") for label in labels[:2])


def _is_local_service(host: str) -> bool:
    return _is_service(host) and host.rstrip(".").endswith("._tcp.local")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
