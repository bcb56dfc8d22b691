"""Checks of Host and Origin, and the proxy's own CORS headers.

A web page anywhere can make a browser send requests to 127.0.0.1, directly or by DNS rebinding. So
on a loopback address Host must be a loopback name or a configured one; on any other address it may
also be an IP address or a name of this machine, which no page can point here. An Origin must be
local or configured. Browsers send no Origin with an image, a frame or a link, but mark the request
as cross-site; it is rejected too. Programs other than browsers send neither header. No GET changes
anything.

Source: W3C Fetch Metadata Request Headers, section 2.4, for `Sec-Fetch-Site`.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import Final

from aiohttp import web

from proxy.common.toml_types import is_loopback
from proxy.errors import BadRequest, ConfigError, Forbidden, quote
from proxy.settings import ProxySettings

_PORT: Final = r"(?::\d{1,5})?"
_LOCAL: Final = rf"(?:localhost|127\.0\.0\.1|\[::1\]){_PORT}"
_LOCAL_HOST: Final = re.compile(_LOCAL, re.IGNORECASE)
# Tauri, Electron and VS Code use these for their own pages.
_LOCAL_ORIGIN: Final = (
    rf"https?://(?:{_LOCAL}|tauri\.localhost)|tauri://localhost"
    r"|(?:app|vscode-webview|vscode-file)://[A-Za-z0-9._-]{1,253}"
)
# Sandboxed frames and redirects of any site send "null".
_OPAQUE: Final = frozenset({"null", "file://"})
_ORIGIN: Final = re.compile(
    rf"[a-z][a-z0-9+.-]{{0,63}}://(?:[A-Za-z0-9._*-]{{1,253}}|\[[0-9A-Fa-f:]{{2,39}}\]){_PORT}"
)
_HOST: Final = re.compile(rf"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:]+\]){_PORT}")
_SHOWN_MAX_CHARACTERS: Final = 80
_PREFLIGHT_AGE_S: Final = 600
_FIELD_NAMES: Final = re.compile(r"[A-Za-z0-9_, -]{0,4096}")


class OriginPolicy:
    """Raises ConfigError for an invalid host or origin in the settings."""

    def __init__(self, settings: ProxySettings) -> None:
        self._is_loopback = is_loopback(settings.host)
        # Other machines cannot reach a loopback address, so it needs no names of this machine.
        names = () if self._is_loopback else machine_names(socket.gethostname())
        self._hosts = hosts_of((*settings.allowed_hosts, *names))
        self._origins = origins_of(settings.allowed_origins)

    def check(self, request: web.BaseRequest) -> None:
        """Raises BadRequest for HTTP/0.9, which has no header, else Forbidden."""
        if request.version.major < 1:
            raise BadRequest("HTTP/0.9 is not supported; use HTTP/1.1")
        host = request.headers.get("Host", "")
        if host and not self._is_allowed(host):
            raise Forbidden(
                f"Host {quote(host)} is not allowed; "
                "use localhost or add it to allowed_hosts under [proxy]"
            )
        origin = request.headers.get("Origin")
        if origin is not None and not (self._origins.fullmatch(origin) or _is_own(origin, host)):
            raise Forbidden(f"Origin {quote(origin)} is not allowed{_how_to_allow(origin)}")
        if origin is None and "Sec-Fetch-Site" in request.headers and _is_cross_site(request):
            raise Forbidden(
                "cross-site requests without an Origin are not allowed; enter the address by hand, "
                "or use fetch() and add the page's origin to allowed_origins under [proxy]"
            )

    def cors_headers(self, request: web.BaseRequest) -> dict[str, str]:
        """Empty without an allowed Origin."""
        origin = request.headers.get("Origin")
        if origin is None or not self._origins.fullmatch(origin):
            return {}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": "Retry-After, X-Request-Id",
            "Vary": "Origin",
        }

    def _is_allowed(self, host: str) -> bool:
        if _LOCAL_HOST.fullmatch(host) or self._hosts.fullmatch(host):
            return True
        # DNS rebinding needs a name, not an IP address.
        return not self._is_loopback and _is_address(host)


def is_same_origin(request: web.BaseRequest) -> bool:
    """Return whether a page that was served from this address sent the request.

    A browser says so for every request that can change something. The scheme is not compared: a
    reverse proxy may end TLS.
    """
    sites = {site.strip().lower() for site in request.headers.getall("Sec-Fetch-Site", ())}
    if not sites <= {"same-origin", "none"}:
        return False
    if origin := request.headers.get("Origin"):
        return _is_own(origin, request.headers.get("Host", ""))
    return request.method in {"GET", "HEAD"}


def is_https(request: web.BaseRequest) -> bool:
    """Return whether the browser uses TLS, to us or to a reverse proxy before us."""
    return request.secure or request.headers.get("Origin", "").lower().startswith("https://")


def is_preflight(request: web.BaseRequest) -> bool:
    return request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers


def preflight_response(request: web.BaseRequest) -> web.Response:
    """Allow the announced request, with llama-server's 200; `OriginPolicy.check` passed the origin.

    Chromium before version 142, and so today's Electron, needs
    `Access-Control-Allow-Private-Network`. Source: WICG Private Network Access, section 3.1.
    """
    wanted = request.headers.get("Access-Control-Request-Headers", "")
    response = web.Response(
        headers={
            "Access-Control-Allow-Methods": "GET, HEAD, POST, DELETE, OPTIONS",
            "Access-Control-Allow-Headers": wanted if _FIELD_NAMES.fullmatch(wanted) else "",
            "Access-Control-Max-Age": str(_PREFLIGHT_AGE_S),
        },
    )
    if request.headers.get("Access-Control-Request-Private-Network") == "true":
        response.headers["Access-Control-Allow-Private-Network"] = "true"
    return response


def machine_names(hostname: str) -> tuple[str, ...]:
    """The names of this machine in its network, from its hostname with or without a domain."""
    # Without the resolver: with no network it may take seconds to fail.
    short = hostname.partition(".")[0]
    names = dict.fromkeys((hostname, short, f"{short}.local"))
    return tuple(name for name in names if _HOST.fullmatch(name))


def hosts_of(named: tuple[str, ...]) -> re.Pattern[str]:
    """Match these hosts; one without a port matches any port. Raises ConfigError."""
    for host in named:
        if not _HOST.fullmatch(host):
            raise ConfigError(
                f"proxy.allowed_hosts: {host!r} is not a valid host",
                'use a name of this machine, such as "corral.lan"',
            )
    ports = ("" if re.search(r":\d+$", host) else _PORT for host in named)
    return re.compile(
        "|".join(re.escape(host) + port for host, port in zip(named, ports, strict=True)),
        re.IGNORECASE,
    )


def origins_of(named: tuple[str, ...]) -> re.Pattern[str]:
    """Match the local origins and these.

    One `*` in a host matches any part of it: `https://*.example.com`. "null" and "file://" match
    only literally. Raises ConfigError.
    """
    for origin in named:
        if origin not in _OPAQUE and (not _ORIGIN.fullmatch(origin) or origin.count("*") > 1):
            raise ConfigError(
                f"proxy.allowed_origins: {origin!r} is not a valid origin",
                'use SCHEME://HOST[:PORT] without a path: "https://chat.example.com", '
                '"chrome-extension://ID"; the host may contain one *',
            )
    patterns = (re.escape(origin).replace(r"\*", r"[A-Za-z0-9._-]+") for origin in named)
    return re.compile("|".join((_LOCAL_ORIGIN, *patterns)), re.IGNORECASE)


def _how_to_allow(origin: str) -> str:
    """A clause for an error; empty for what no setting allows."""
    if origin not in _OPAQUE and ("*" in origin or not _ORIGIN.fullmatch(origin)):
        return ""
    shared = "; pages of any site can send it" if origin in _OPAQUE else ""
    if len(origin) > _SHOWN_MAX_CHARACTERS:
        return shared
    line = f'allowed_origins = ["{origin}"]'
    return f"{shared}; to allow it, write {line} under [proxy] and restart the daemon"


def _is_own(origin: str, host: str) -> bool:
    scheme, _, authority = origin.lower().partition("://")
    return scheme in {"http", "https"} and bool(host) and authority == host.lower()


def _is_cross_site(request: web.BaseRequest) -> bool:
    sites = request.headers.getall("Sec-Fetch-Site", ())
    return any(site.strip().lower() == "cross-site" for site in sites)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(re.sub(r":\d{1,5}$", "", host).strip("[]"))
    except ValueError:
        return False
    return True
