"""`[nodes.NAME]`: another machine, or all machines of a name, whose models are served here too.

The url has the address of one machine, a name with a machine for each of its records, or the
pattern of files that name machines.
"""

from __future__ import annotations

import functools
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from proxy.common.toml_types import ExpandedPath, SettingsTable, Text

Discovery = Literal["dns", "mdns", "file"]
_DISCOVERIES: Final[Mapping[str, Discovery]] = {"dns": "dns", "mdns": "mdns", "file": "file"}

_PORTS: Final = {"http": 80, "https": 443}
_DNS_PORT: Final = 53


@dataclass(frozen=True, slots=True)
class NodeUrl:
    discovery: Discovery | None  # The source of the addresses; None: the host is one machine.
    is_tls: bool
    is_service: bool  # Whether the host names SRV records, which have the ports.
    host: str  # With files, the pattern of their paths.
    port: int  # The port in the url, or the default of its scheme.
    prefix: str  # Prefix of every path: empty or `/something`.


def normalized(url: str) -> str:
    """Return a node's base URL without a trailing `/v1`, which clients add; raises ValueError."""
    shown = url.rstrip("/").removesuffix("/v1").rstrip("/")
    parse_url(shown)
    if not url.isprintable():
        raise ValueError("more than an address; a key belongs into key_file")
    return shown


@functools.lru_cache(maxsize=1024)
def parse_url(url: str) -> NodeUrl:
    """Parse a node's url; raises ValueError."""
    parts = urlsplit(url)
    prefix, _, scheme = parts.scheme.rpartition("+")
    discovery = _DISCOVERIES.get(prefix)
    if prefix and not discovery:
        raise ValueError("not http:// or https://, nor dns+, mdns+ or file+ before it")
    if discovery == "file":
        return _parse_files(parts.netloc, parts.path, scheme)
    if scheme not in _PORTS or not parts.hostname:
        raise ValueError("not http://HOST:PORT or https://HOST:PORT, nor dns+ or mdns+ before it")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError("more than an address; a key belongs into key_file")
    if parts.port == 0:  # reading `port` rejects other invalid ones
        raise ValueError("not a port")
    host, is_service = parts.hostname, _is_service(parts.hostname)
    if discovery:
        _check_name(discovery, host, has_port=parts.port is not None)
    return NodeUrl(
        discovery=discovery,
        is_tls=scheme == "https",
        is_service=is_service,
        host=host,
        port=parts.port or _PORTS[scheme],
        prefix=parts.path,
    )


def _check_name(discovery: Discovery, host: str, *, has_port: bool) -> None:
    is_service = _is_service(host)
    if _is_address(host):
        raise ValueError(f"{host} is an address, which has no records; write it without dns+")
    if is_service and has_port:
        raise ValueError("a port, which comes from the SRV records; leave it out")
    is_local_service = is_service and host.rstrip(".").endswith("._tcp.local")
    if discovery == "mdns" and not is_local_service:
        raise ValueError("not mdns+http://_llama-corral._tcp.local, or another service of .local")


def _parse_files(netloc: str, path: str, scheme: str) -> NodeUrl:
    directory, _, name = path.rpartition("/")
    is_plain = not any(character in directory for character in "*?[")
    if netloc or not name or not is_plain or scheme not in _PORTS:
        raise ValueError("not file+http:///DIRECTORY/*.json, with three slashes")
    is_tls = scheme == "https"
    return NodeUrl("file", is_tls, is_service=False, host=path, port=_PORTS[scheme], prefix="")


def parse_name_server(text: str) -> tuple[str, int]:
    """Return the address and the port of `ADDRESS`, `ADDRESS:PORT` or `[ADDRESS]:PORT`.

    Raises ValueError.
    """
    try:
        return str(ipaddress.ip_address(text)), _DNS_PORT
    except ValueError:
        parts = urlsplit(f"//{text}")
    if parts.netloc != text or "@" in text or not _is_address(parts.hostname or ""):
        raise ValueError("not the address of a name server, as 10.96.0.10 or 127.0.0.1:5353")
    return str(ipaddress.ip_address(parts.hostname or "")), parts.port or _DNS_PORT


def _is_service(host: str) -> bool:
    """Return whether a name is one of SRV records. Source: RFC 2782, `_Service._Proto.Name`."""
    labels = host.split(".")
    return len(labels) > 2 and all(label.startswith("_") for label in labels[:2])


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _name_server(text: str) -> str:
    parse_name_server(text)
    return text


class NodeSettings(SettingsTable):
    """`[nodes.NAME]`: another machine whose models are served here too."""

    url: Annotated[str, AfterValidator(normalized)]
    """its base URL, as http://192.168.1.7:8080: another llama-corral, a llama-server, or any server
    with OpenAI's API; dns+http://NAME:8080 is as many nodes as the name has addresses, or SRV
    records if it begins with _service._proto; mdns+http://_llama-corral._tcp.local those that
    announce themselves in the local network; file+http:///DIRECTORY/*.json those that have a file
    there (announce_in)"""
    resolver: Annotated[Text, AfterValidator(_name_server)] | None = None
    """ADDRESS:PORT of the name server to ask for a url with dns+; unset: those of the system"""
    key_file: ExpandedPath | None = None
    """file with its API key, readable by this user alone"""
    ca_file: ExpandedPath | None = None
    """PEM file of the CAs that may sign the node's certificate; unset: the system's CAs"""
    cert: ExpandedPath | None = None
    """PEM file of the client certificate, if the node requires one; needs key"""
    key: ExpandedPath | None = None
    """PEM file of the key of cert, readable by this user alone"""
    models: tuple[Text, ...] = ()
    """ids of its models to serve here; unset: all"""
    on_demand: bool = False
    """whether another program starts machines when a model is requested, so that requests for
    `models` wait (queue_timeout_s) while no machine has them; needs models"""
    slots: int = Field(4, ge=1, le=1024)
    """concurrent requests for each model, if it does not report its slots"""
    local_first: bool = True
    """whether it gets new conversations only when no local slot is free; a conversation that began
    there stays there"""
    load: Literal["never", "idle"] = "never"
    """whether the node is asked to load a model if no machine has it loaded, or if all that have it
    are busy; the node must allow this by load_for_others in its own [proxy]"""
    weight: float | None = Field(None, gt=0, le=100)
    """its share of requests as a multiple of an average instance's; unset: by its measured speed"""

    @property
    def parsed_url(self) -> NodeUrl:
        return parse_url(self.url)

    @property
    def tls_files(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.ca_file, self.cert, self.key) if path is not None)

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if (self.cert is None) != (self.key is None):
            raise ValueError("cert and key belong together: set both or none")
        if self.resolver and self.parsed_url.discovery != "dns":
            raise ValueError("resolver is for a url with dns+")
        if self.tls_files and not self.parsed_url.is_tls:
            raise ValueError("ca_file, cert and key are for a url with https://")
        if self.on_demand and not self.models:
            raise ValueError("on_demand: requests wait only for known models; list them in models")
        return self
