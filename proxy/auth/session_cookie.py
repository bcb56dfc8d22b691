"""The cookie of a dashboard's session, and the header that must come with it.

Browsers send a host's cookies to all of its ports, so the port is part of the name: two daemons,
or two tunnels to daemons, do not overwrite each other's. For the same reason a program on another
port can read it, so the page sends a token in a header too. Requests that another site caused have
none. Source of `__Host-`: RFC 6265bis, section 4.1.3.2.
"""

from __future__ import annotations

import re
from typing import Final

from aiohttp import web

from proxy.auth.origin import is_https
from proxy.auth.sessions import LIFE_MAX_S

PAGE_TOKEN: Final = "X-Corral-Session"  # noqa: S105 (the name of a header)
_PATH: Final = "/corral"
_HOST_PREFIX: Final = "__Host-"
_PORT: Final = re.compile(r":(\d{1,5})$")


def cookie_name(host: str) -> str:
    """The name for a value of the field Host."""
    port = _PORT.search(host)
    return f"corral_session_{port[1]}" if port else "corral_session"


def session_id_of(request: web.BaseRequest) -> str | None:
    name = cookie_name(request.headers.get("Host", ""))
    # A GET by way of a reverse proxy does not tell whether that one uses TLS.
    return request.cookies.get(_HOST_PREFIX + name) or request.cookies.get(name)


def set_cookie(request: web.BaseRequest, response: web.Response, session_id: str) -> None:
    name, path = _name_and_path(request)
    response.set_cookie(
        name,
        session_id,
        path=path,
        max_age=int(LIFE_MAX_S),
        secure=is_https(request),
        httponly=True,
        samesite="Strict",
    )


def delete_cookie(request: web.BaseRequest, response: web.Response) -> None:
    name, path = _name_and_path(request)
    response.del_cookie(name, path=path, secure=is_https(request))


def _name_and_path(request: web.BaseRequest) -> tuple[str, str]:
    """Browsers take `__Host-` with TLS alone, and for the path `/` alone."""
    name = cookie_name(request.headers.get("Host", ""))
    return (_HOST_PREFIX + name, "/") if is_https(request) else (name, _PATH)
