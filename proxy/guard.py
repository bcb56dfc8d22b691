"""Who may ask: checks of Host and Origin, and the CORS answers that belong to them.

A web page anywhere can make a browser send requests to 127.0.0.1, by an address that changes its
mind (DNS rebinding) or plainly. So on a loopback address the Host must be a loopback name, and an
Origin, which only browsers send, must be local: localhost itself, or a desktop application's own
scheme. Programs send no Origin and are not touched. No page changes anything by GET.
"""

from __future__ import annotations

import ipaddress
import re
from typing import Final

from aiohttp import web

from proxy.errors import Forbidden, quoted

_LOCAL: Final = r"(?:localhost|127\.0\.0\.1|\[::1\])(?::\d{1,5})?"
_LOCAL_HOST: Final = re.compile(_LOCAL, re.IGNORECASE)
_LOCAL_ORIGIN: Final = re.compile(
    rf"https?://(?:{_LOCAL}|tauri\.localhost)|(?:tauri|app|vscode-webview)://[A-Za-z0-9._-]{{1,253}}",
    re.IGNORECASE,
)
_PREFLIGHT_AGE_S: Final = 600
_FIELD_NAMES: Final = re.compile(r"[A-Za-z0-9_, -]{0,4096}")


def check(request: web.Request, *, is_loopback: bool) -> None:
    """Let a request pass, or not.

    Args:
        request: The request; only its header is looked at.
        is_loopback: Whether the server listens on a loopback address.

    Raises:
        Forbidden: The Host or the Origin is foreign.
    """
    host = request.headers.get("Host", "")
    if is_loopback and host and not _LOCAL_HOST.fullmatch(host):
        raise Forbidden(f"the Host {quoted(host)} is not this machine; use localhost")
    origin = request.headers.get("Origin")
    if origin is not None and not _LOCAL_ORIGIN.fullmatch(origin):
        raise Forbidden(f"pages of the origin {quoted(origin)} may not ask here")


def is_preflight(request: web.Request) -> bool:
    """Return whether a browser asks if a page may ask."""
    return request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers


def preflight_response(request: web.Request) -> web.Response:
    """Answer a browser whose origin passed `check`: it may send what it announced."""
    wanted = request.headers.get("Access-Control-Request-Headers", "")
    return web.Response(
        status=204,
        headers={
            "Access-Control-Allow-Methods": "GET, HEAD, POST, OPTIONS",
            "Access-Control-Allow-Headers": wanted if _FIELD_NAMES.fullmatch(wanted) else "",
            "Access-Control-Max-Age": str(_PREFLIGHT_AGE_S),
        },
    )


def cors_headers(request: web.Request) -> dict[str, str]:
    """Return what lets the page of an origin read our answer; nothing for programs."""
    origin = request.headers.get("Origin")
    if origin is None or not _LOCAL_ORIGIN.fullmatch(origin):
        return {}
    return {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Expose-Headers": "Retry-After, X-Request-Id",
        "Vary": "Origin",
    }


def is_loopback(host: str) -> bool:
    """Return whether an address to listen on can only be reached from this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
