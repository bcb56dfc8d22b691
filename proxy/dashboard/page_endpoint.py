"""The dashboard's page. Its files hold no data, so they need no key.

Source: W3C Content Security Policy Level 3; WHATWG Fetch, section 3.7 on
`Cross-Origin-Resource-Policy`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Final

from aiohttp import web

from proxy.auth.access import LIBRARIES, PAGE, ROOT
from proxy.dashboard.static_files import INDEX, StaticFile, library_files, page_files
from proxy.errors import NotFound
from proxy.routes import PATH_ID, Routes

_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": _POLICY,
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }
)


class PageEndpoint:
    """`vendor` has the libraries of the page; files are read at the first request for one."""

    def __init__(self, vendor: Path) -> None:
        self._vendor = vendor

    def add_routes(self, routes: Routes) -> None:
        routes.add(ROOT, get=self.root)
        routes.add("/corral", get=self.redirect)
        routes.add("/corral/", get=self.index)
        routes.add(PAGE + "{id}", get=self.page)
        routes.add(LIBRARIES + "{id}", get=self.library)

    async def root(self, request: web.BaseRequest) -> web.Response:
        """Send a browser to the page; raises NotFound for all others."""
        if "text/html" not in request.headers.get("Accept", ""):
            raise NotFound("no such endpoint; GET /v1/models lists the models")
        return await self.redirect(request)

    async def redirect(self, _: web.BaseRequest) -> web.Response:
        """Links of the page are relative to the folder."""
        return web.Response(status=307, headers={**_HEADERS, "Location": "/corral/"})

    async def index(self, request: web.BaseRequest) -> web.Response:
        return _answer(request, self._page.get(INDEX))

    async def page(self, request: web.BaseRequest) -> web.Response:
        return _answer(request, self._page.get(request[PATH_ID]))

    async def library(self, request: web.BaseRequest) -> web.Response:
        return _answer(request, self._libraries.get(request[PATH_ID]))

    @cached_property
    def _page(self) -> Mapping[str, StaticFile]:
        return page_files()

    @cached_property
    def _libraries(self) -> Mapping[str, StaticFile]:
        return library_files(self._vendor)


def _answer(request: web.BaseRequest, file: StaticFile | None) -> web.Response:
    if file is None:
        raise NotFound("the dashboard has no such file; its page is /corral/")
    headers = {**_HEADERS, "ETag": file.etag}
    if file.etag in request.headers.get("If-None-Match", ""):
        return web.Response(status=304, headers=headers)
    return web.Response(body=file.body, headers={**headers, "Content-Type": file.content_type})
