"""Which pages of a browser may ask: checks of Host and Origin, and CORS answered by us.

A web page anywhere can make a browser send requests to 127.0.0.1, by an address that changes its
mind (DNS rebinding) or plainly. So on a loopback address the Host must be a loopback name or one
that is set; on any other it may also be an IP address or a name of this machine, never a name that
somebody else could make lead here. An Origin, which only browsers send, must be local or set:
localhost itself, or a desktop application's own scheme. Browsers send no Origin with a picture, a
frame or a link, but they say that the page is of another site; that is refused too. Programs send
neither and are not touched. No page changes anything by GET.

Source: W3C Fetch Metadata Request Headers, section 2.4, for `Sec-Fetch-Site`.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import Final

from aiohttp import web

from proxy.errors import BadRequest, ConfigError, Forbidden, quoted
from proxy.settings import ProxySettings

_PORT: Final = r"(?::\d{1,5})?"
_LOCAL: Final = rf"(?:localhost|127\.0\.0\.1|\[::1\]){_PORT}"
_LOCAL_HOST: Final = re.compile(_LOCAL, re.IGNORECASE)
# The origins that Tauri, Electron and VS Code give to their own pages.
_LOCAL_ORIGIN: Final = (
    rf"https?://(?:{_LOCAL}|tauri\.localhost)|tauri://localhost"
    r"|(?:app|vscode-webview|vscode-file)://[A-Za-z0-9._-]{1,253}"
)
# "null" is what sandboxed frames and redirects call themselves, and anybody's page can be one.
_OPAQUE: Final = frozenset({"null", "file://"})
_ORIGIN: Final = re.compile(rf"[a-z][a-z0-9+.-]*://(?:[A-Za-z0-9._*-]+|\[[0-9A-Fa-f:]+\]){_PORT}")
_HOST: Final = re.compile(rf"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\]){_PORT}")
_PREFLIGHT_AGE_S: Final = 600
_FIELD_NAMES: Final = re.compile(r"[A-Za-z0-9_, -]{0,4096}")


class OriginPolicy:
    """Knows which hosts and origins are ours.

    Raises:
        ConfigError: A host or an origin in the settings is none.
    """

    def __init__(self, settings: ProxySettings) -> None:
        self._is_loopback = is_loopback(settings.host)
        self._hosts = hosts_of(settings.allowed_hosts)
        # On a loopback address no name but those is ours: nobody else can come by it.
        names = () if self._is_loopback else machine_names(socket.gethostname())
        self._machine = hosts_of(names)
        self._origins = origins_of(settings.allowed_origins)

    def check(self, request: web.Request) -> None:
        """Let a request pass, or not; only its header is looked at.

        Raises:
            BadRequest: It is older than HTTP/1.0, which knows no header.
            Forbidden: The Host, the Origin or the site of the page that asks is foreign.
        """
        if request.version.major < 1:
            raise BadRequest("HTTP/0.9 is not spoken here")
        host = request.headers.get("Host", "")
        if host and not self._is_ours(host):
            raise Forbidden(
                f"the Host {quoted(host)} is not this machine; "
                "use localhost, or add the name to allowed_hosts under [proxy]"
            )
        origin = request.headers.get("Origin")
        if origin is not None and not self._origins.fullmatch(origin):
            raise Forbidden(
                f"pages of the origin {quoted(origin)} may not ask here; "
                "those that may are set by allowed_origins under [proxy]"
            )
        if origin is None and _is_cross_site(request):
            raise Forbidden(
                "a page of another site may not ask here without an Origin; type the address, "
                "or let the page ask by fetch and add its origin to allowed_origins under [proxy]"
            )

    def cors_headers(self, request: web.Request) -> dict[str, str]:
        """Return what lets the page of an origin read our answer; nothing for programs."""
        origin = request.headers.get("Origin")
        if origin is None or not self._origins.fullmatch(origin):
            return {}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": "Retry-After, X-Request-Id",
            "Vary": "Origin",
        }

    def _is_ours(self, host: str) -> bool:
        if _LOCAL_HOST.fullmatch(host) or self._hosts.fullmatch(host):
            return True
        if self._is_loopback:
            return False
        # An address is no name that could be made to lead here.
        return _is_address(host) or bool(self._machine.fullmatch(host))


def is_preflight(request: web.Request) -> bool:
    """Return whether a browser asks if a page may ask."""
    return request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers


def preflight_response(request: web.Request) -> web.Response:
    """Answer a browser whose origin passed `Guard.check`: it may send what it announced.

    `Access-Control-Allow-Private-Network` is what Chromium asked for before version 142, and with
    it the Electron of today. Source: WICG Private Network Access, section 3.1.
    """
    wanted = request.headers.get("Access-Control-Request-Headers", "")
    response = web.Response(
        status=204,
        headers={
            "Access-Control-Allow-Methods": "GET, HEAD, POST, OPTIONS",
            "Access-Control-Allow-Headers": wanted if _FIELD_NAMES.fullmatch(wanted) else "",
            "Access-Control-Max-Age": str(_PREFLIGHT_AGE_S),
        },
    )
    if request.headers.get("Access-Control-Request-Private-Network") == "true":
        response.headers["Access-Control-Allow-Private-Network"] = "true"
    return response


def is_loopback(host: str) -> bool:
    """Return whether an address to listen on can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def machine_names(hostname: str) -> tuple[str, ...]:
    """Return the names under which others reach this machine, as far as it knows them itself.

    The resolver is not asked: without a network it may take seconds to say that there is none.

    Args:
        hostname: As the system has it, with or without a domain.
    """
    short = hostname.partition(".")[0]
    names = dict.fromkeys((hostname, short, f"{short}.local"))
    return tuple(name for name in names if _HOST.fullmatch(name))


def hosts_of(named: tuple[str, ...]) -> re.Pattern[str]:
    """Return what matches the named hosts, with any port where none is named.

    Raises:
        ConfigError: One is no name and no address.
    """
    for host in named:
        if not _HOST.fullmatch(host):
            raise ConfigError(
                f"proxy.allowed_hosts: {host!r} is no host",
                'write a name of this machine: "corral.lan"',
            )
    ports = ("" if re.search(r":\d+$", host) else _PORT for host in named)
    return re.compile(
        "|".join(re.escape(host) + port for host, port in zip(named, ports, strict=True)),
        re.IGNORECASE,
    )


def origins_of(named: tuple[str, ...]) -> re.Pattern[str]:
    """Return what matches the local origins and the named ones.

    One `*` in the host of a named one stands for any part of it: `https://*.example.com`. "null"
    and "file://" are taken only as they stand.

    Raises:
        ConfigError: One is no origin, or has more than one `*`.
    """
    for origin in named:
        if origin not in _OPAQUE and (not _ORIGIN.fullmatch(origin) or origin.count("*") > 1):
            raise ConfigError(
                f"proxy.allowed_origins: {origin!r} is no origin",
                'write SCHEME://HOST[:PORT] without a path: "https://chat.example.com"; '
                "one * may stand in the host",
            )
    patterns = (re.escape(origin).replace(r"\*", r"[A-Za-z0-9._-]+") for origin in named)
    return re.compile("|".join((_LOCAL_ORIGIN, *patterns)), re.IGNORECASE)


def _is_cross_site(request: web.Request) -> bool:
    """Return whether a browser says that a page of another site asks."""
    said = request.headers.getall("Sec-Fetch-Site", ())
    return any(site.strip().lower() == "cross-site" for site in said)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(re.sub(r":\d{1,5}$", "", host).strip("[]"))
    except ValueError:
        return False
    return True
