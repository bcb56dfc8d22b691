"""The cookie of a dashboard's session.

Browsers send a host's cookies to all of its ports, so the port is part of the name: two daemons,
or two tunnels to daemons, do not overwrite each other's. Only paths below `/corral` get it, and no
request that another site caused.
"""

from __future__ import annotations

import re
from typing import Final

from aiohttp import web

from proxy.auth.origin import is_https
from proxy.auth.sessions import LIFE_MAX_S

_PATH: Final = "/corral"
_PORT: Final = re.compile(r":(\d{1,5})$")


def cookie_name(host: str) -> str:
    """The name for a value of the field Host."""
    port = _PORT.search(host)
    return f"corral_session_{port[1]}" if port else "corral_session"


def session_id_of(request: web.BaseRequest) -> str | None:
    return request.cookies.get(cookie_name(request.headers.get("Host", "")))


def set_cookie(request: web.BaseRequest, response: web.Response, session_id: str) -> None:
    response.set_cookie(
        cookie_name(request.headers.get("Host", "")),
        session_id,
        path=_PATH,
        max_age=int(LIFE_MAX_S),
        secure=is_https(request),
        httponly=True,
        samesite="Strict",
    )


def delete_cookie(request: web.BaseRequest, response: web.Response) -> None:
    response.del_cookie(cookie_name(request.headers.get("Host", "")), path=_PATH)
