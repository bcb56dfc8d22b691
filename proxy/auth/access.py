"""Decides whether a request may come in: its Host and Origin, its API key or dashboard session.

A web page anywhere can make a browser send requests to 127.0.0.1, directly or by DNS rebinding. So
on a loopback address Host must be a loopback name or a configured one; on any other address it may
also be an IP address or a name of this machine, which no page can point here. An Origin must be
local or configured. Browsers send no Origin with an image, a frame or a link, but mark the request
as cross-site; such requests are rejected too. Programs other than browsers send neither header. No
GET changes anything.

A session of the dashboard is accepted only below `/corral/v1/`, and only for requests of the
dashboard's page: their origin must be the address that they are sent to, and they have the page
token beside the cookie. `SameSite` is too weak for that: all ports of a host are one site and get
the same cookie.

Source: W3C Fetch Metadata Request Headers, section 2.4, for `Sec-Fetch-Site`.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from typing import Final

from aiohttp import web

from proxy.auth.api_keys import KEY, OPEN_PATHS, ApiKeys
from proxy.auth.auth_proxy import AuthProxy
from proxy.auth.keys_file import Key
from proxy.auth.sessions import OWNER, PAGE_TOKEN, Sessions, SignedIn, session_id_of
from proxy.common.toml_types import is_loopback
from proxy.errors import (
    BadRequest,
    ConfigError,
    Forbidden,
    SessionRequired,
    UnsupportedMediaType,
    quote,
)
from proxy.settings import ProxySettings

ROOT: Final = "/"
PREFIX: Final = "/corral"
API: Final = "/corral/v1/"
CHAT: Final = "/corral/v1/chat/completions"
BATCH_COMPLETIONS: Final = "/v1/batch/completions"
BATCH_TOKENIZE: Final = "/batch/tokenize"
SESSION: Final = "/corral/v1/session"
END_SESSION: Final = "/corral/v1/session/end"
PAGE: Final = "/corral/page/"
LIBRARIES: Final = "/corral/vendor/"
_PAGES: Final = frozenset({ROOT, PREFIX, "/corral/"})
_PAGE_PATHS: Final = _PAGES | {SESSION, END_SESSION}
# Tells another llama-corral which prompts the caches hold.
PREFIXES: Final = "/corral/v1/prefixes"
# Tells another llama-corral its models, memory and requests.
MACHINE: Final = "/corral/v1/machine"
# Copies slot files to other machines.
SLOT_FILES: Final = "/corral/v1/slot-files"
# Polled by other machines, which name themselves by a hop.
MODELS: Final = "/v1/models"
# Health probes and the polls of other machines do not count towards a key's limits. Of a session's
# requests, only chats count.
UNCOUNTED: Final = OPEN_PATHS | {PREFIXES, MACHINE}
# Each prompt of these requests is admitted separately.
WITH_PARTS: Final = frozenset({BATCH_COMPLETIONS, BATCH_TOKENIZE})

# The session of a request, or None.
SIGNED_IN: Final[web.RequestKey[SignedIn | None]] = web.RequestKey("signed_in", SignedIn)


class Access:
    """Finds the key or session of a request; `sessions` is None if there is no dashboard."""

    def __init__(self, keys: ApiKeys, sessions: Sessions | None = None) -> None:
        self.keys = keys
        self._sessions = sessions

    def is_open(self, request: web.BaseRequest) -> bool:
        if request.path in OPEN_PATHS:
            return True
        return self._sessions is not None and is_page(request)

    def key_of(self, request: web.BaseRequest) -> Key | None:
        """Return the key of the request or of its session; None if none is needed.

        Raises:
            Unauthorized: It has no valid key, or a session's cookie without its page token.
            Forbidden: Another page uses the session.
            UnsupportedMediaType: It changes something, and its body is not JSON.
        """
        if self._sessions and request.path.startswith(API) and (found := session_id_of(request)):
            signed_in = self._sessions.use(found, request.headers.get(PAGE_TOKEN, ""))
            if signed_in:
                check_same_origin(request)
                request[SIGNED_IN] = signed_in
                return signed_in.client
        return self.keys.key_of(request)


def is_page(request: web.BaseRequest) -> bool:
    """Return whether a request is for the page's files, which hold no data, or signs in or out."""
    path = request.rel_url.path_safe
    return path in _PAGE_PATHS or path.startswith((PAGE, LIBRARIES))


def check_same_origin(request: web.BaseRequest) -> None:
    """Check that the dashboard's page itself sent a request; raises Forbidden.

    Raises UnsupportedMediaType for a change whose body is not JSON.
    """
    if not is_same_origin(request):
        raise Forbidden(
            "only the dashboard's own page may use its session; other programs send an API key"
        )
    if request.method not in {"GET", "HEAD"} and request.content_type != "application/json":
        raise UnsupportedMediaType("the body must be JSON, with Content-Type: application/json")


def check_admin(request: web.BaseRequest) -> Key:
    """Return the admin's key of a request or its session. Raises SessionRequired, Forbidden."""
    key = request[KEY]
    if key is None:
        raise SessionRequired
    if not key.admin:
        raise Forbidden(f"API key {key.name!r} is not an admin's (admin = true in the keys file)")
    return key


def check_may_use_tools(request: web.BaseRequest) -> None:
    """Check that a request may use an engine's tools; raises Forbidden.

    It may run any command, so `allowed_origins` and an admin's key do not suffice. Without keys, it
    must come from this machine and not through a reverse proxy.
    """
    _check_own_origin(request, "use the tools of an engine")
    key = request[KEY]
    if key is not None and not key.tools:
        raise Forbidden(
            f"API key {key.name!r} may not use the tools of engines (tools = true in the keys file)"
        )
    if key is None and not _is_from_this_machine(request):
        raise Forbidden(
            "without an API key only programs of this machine may use the tools of an engine; "
            "`corral key add NAME --tools` creates a key"
        )


def check_may_edit_settings(request: web.BaseRequest) -> None:
    """Check that a request may read and write the settings file.

    The file names programs that the daemon runs, so an admin's key does not suffice: it must be
    one of `corral ui`, which this user has run, or have `tools`. Raises SessionRequired, Forbidden.
    """
    key = check_admin(request)
    _check_own_origin(request, "edit corral.toml")
    if key is not OWNER and not key.tools:
        raise Forbidden(
            f"API key {key.name!r} may not edit corral.toml, which names programs to run: sign in "
            "with `corral ui`, or set tools = true in the keys file"
        )


def _is_from_this_machine(request: web.BaseRequest) -> bool:
    if any(name in request.headers for name in _RELAYED):
        return False
    host, remote = request.headers.get("Host", ""), (request.remote or "").removeprefix("::ffff:")
    is_local = re.fullmatch(_LOCAL, host, re.IGNORECASE) is not None
    return is_local and bool(remote) and ipaddress.ip_address(remote).is_loopback


# A reverse proxy on this machine adds one of these.
_RELAYED: Final = ("Forwarded", "Via", "X-Forwarded-For", "X-Real-IP")
_IDENTITY: Final = "use a user's sign-in; does the reverse proxy pass on Host?"
_PORT: Final = r"(?::\d{1,5})?"
_LOCAL: Final = rf"(?:localhost|127\.0\.0\.1|\[::1\]){_PORT}"
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
_FIELD_NAMES: Final = re.compile(r"[A-Za-z0-9_, -]{0,4096}")


class OriginPolicy:
    """Checks the Host and Origin of requests. Raises ConfigError if the settings are invalid."""

    def __init__(self, settings: ProxySettings) -> None:
        self._is_loopback = is_loopback(settings.host)
        # Other machines cannot reach a loopback address, so it needs no names of this machine.
        names = () if self._is_loopback else machine_names(socket.gethostname())
        self._hosts = hosts_of((*settings.allowed_hosts, *names))
        # Hosts that were accepted before: without `Origin` and `Sec-Fetch-Site`, nothing is left to
        # check.
        self.accepted: set[str] = set()
        self._origins = origins_of(settings.allowed_origins)
        self._auth_proxy = AuthProxy(settings.auth_proxy) if settings.auth_proxy else None

    def check(self, request: web.BaseRequest) -> None:
        """Raises Forbidden, or BadRequest for HTTP/0.9, which has no header."""
        if request.version.major < 1:
            raise BadRequest("HTTP/0.9 is not supported; use HTTP/1.1")
        host = request.headers.get("Host", "")
        if host and not (self._hosts.fullmatch(host) or self._is_address(host)):
            raise Forbidden(
                f"Host {quote(host)} is not allowed; "
                "use localhost or add it to allowed_hosts under [proxy]"
            )
        if host and len(self.accepted) < 64:
            self.accepted.add(host)
        origin = request.headers.get("Origin")
        if origin is not None and not (
            self._origins.fullmatch(origin) or _is_own_origin(origin, host)
        ):
            raise Forbidden(f"Origin {quote(origin)} is not allowed{_how_to_allow(origin)}")
        if self._auth_proxy and self._auth_proxy.is_sender(request):
            if not (_is_navigation(request) and request.rel_url.path_safe in _PAGES):
                _check_own_origin(request, _IDENTITY)
            return
        is_marked = origin is None and "Sec-Fetch-Site" in request.headers
        if is_marked and "cross-site" in _sites_of(request):
            raise Forbidden(
                "cross-site requests without an Origin are not allowed; enter the address by hand, "
                "or use fetch() and add the page's origin to allowed_origins under [proxy]"
            )

    def cors_headers(self, request: web.BaseRequest) -> dict[str, str]:
        origin = request.headers.get("Origin")
        if origin is None or not self._origins.fullmatch(origin):
            return {}
        return {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": "Retry-After, X-Request-Id",
            "Vary": "Origin",
        }

    def _is_address(self, host: str) -> bool:
        """Return whether it is an address that may be used; DNS rebinding needs a name."""
        if self._is_loopback:
            return False
        try:
            ipaddress.ip_address(re.sub(r":\d{1,5}$", "", host).strip("[]"))
        except ValueError:
            return False
        return True


def is_same_origin(request: web.BaseRequest) -> bool:
    """Return whether a page that was served from this address sent the request.

    A browser reports that for every request that can change something. The scheme is not compared:
    a reverse proxy may terminate TLS.
    """
    if not _sites_of(request) <= {"same-origin", "none"}:
        return False
    if origin := request.headers.get("Origin"):
        return _is_own_origin(origin, request.headers.get("Host", ""))
    return request.method in {"GET", "HEAD"}


def preflight_response(request: web.BaseRequest) -> web.Response:
    """Allow the announced request with status 200, as llama-server does.

    `OriginPolicy.check` has accepted the origin. Chromium before version 142, and so today's
    Electron, needs
    `Access-Control-Allow-Private-Network`. Source: WICG Private Network Access, section 3.1.
    """
    wanted = request.headers.get("Access-Control-Request-Headers", "")
    response = web.Response(
        headers={
            "Access-Control-Allow-Methods": "GET, HEAD, POST, DELETE, OPTIONS",
            "Access-Control-Allow-Headers": wanted if _FIELD_NAMES.fullmatch(wanted) else "",
            "Access-Control-Max-Age": "600",
        }
    )
    if request.headers.get("Access-Control-Request-Private-Network") == "true":
        response.headers["Access-Control-Allow-Private-Network"] = "true"
    return response


def machine_names(hostname: str) -> tuple[str, ...]:
    # The resolver is not used: without a network it may take seconds to fail.
    short = hostname.partition(".")[0]
    names = dict.fromkeys((hostname, short, f"{short}.local"))
    return tuple(name for name in names if _HOST.fullmatch(name))


def hosts_of(named: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern for the local hosts and these; without a port, any port matches.

    Raises ConfigError.
    """
    for host in named:
        if not _HOST.fullmatch(host):
            raise ConfigError(
                f"proxy.allowed_hosts: {host!r} is not a valid host",
                'use a name of this machine, such as "corral.lan"',
            )
    ports = ("" if re.search(r":\d+$", host) else _PORT for host in named)
    patterns = (re.escape(host) + port for host, port in zip(named, ports, strict=True))
    return re.compile("|".join((_LOCAL, *patterns)), re.IGNORECASE)


def origins_of(named: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern that matches the local origins and the configured ones.

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
    if origin not in _OPAQUE and ("*" in origin or not _ORIGIN.fullmatch(origin)):
        return ""
    shared = "; pages of any site can send it" if origin in _OPAQUE else ""
    if len(origin) > 80:
        return shared
    line = f'allowed_origins = ["{origin}"]'
    return f"{shared}; to allow it, write {line} under [proxy] and restart the daemon"


def _is_navigation(request: web.BaseRequest) -> bool:
    """Return whether a browser opens a page in a tab: in no frame, and with no body."""
    fields = request.headers
    found = fields.get("Sec-Fetch-Mode"), fields.get("Sec-Fetch-Dest")
    return request.method == "GET" and found == ("navigate", "document")


def _check_own_origin(request: web.BaseRequest, purpose: str) -> None:
    """Check that no page of another origin has sent a request; raises Forbidden."""
    origin = request.headers.get("Origin")
    is_own = origin is None or _is_own_origin(origin, request.headers.get("Host", ""))
    if not is_own or not _sites_of(request) <= {"same-origin", "none"}:
        raise Forbidden(f"a web page of another origin may not {purpose}")


def _is_own_origin(origin: str, host: str) -> bool:
    """Return whether an Origin is the address that a request is sent to, with any scheme."""
    scheme, _, authority = origin.lower().partition("://")
    return scheme in {"http", "https"} and bool(host) and authority == host.lower()


def _sites_of(request: web.BaseRequest) -> set[str]:
    return {site.strip().lower() for site in request.headers.getall("Sec-Fetch-Site", ())}
