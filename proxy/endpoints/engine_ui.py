"""llama.cpp's own web UI, at a separate address.

Its files come from an engine that is loaded here; everything else there is as at the proxy's
address. The UI shows model output as a page, so it must not share the dashboard's origin, and its
address has nothing of the dashboard.

Source: llama.cpp, tools/server/server-http.cpp and tools/ui, build 10434: the files are named in
the binary, gzipped, and `--no-ui` leaves them out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from http import HTTPStatus
from typing import Final

from aiohttp import web

from proxy.apis.llama_server import relay
from proxy.auth.access import PREFIX, Access
from proxy.auth.keys_file import Key
from proxy.endpoints.feature import Core, Feature
from proxy.errors import NotFound, Unavailable
from proxy.http.middleware import Routes
from proxy.upstream.client import UpstreamResponse, get_request
from proxy.upstream.upstream import Upstream

_EXACT: Final = frozenset(
    {"/", "/build.json", "/bundle.css", "/bundle.js", "/index.html", "/sw.js"}
)
_PREFIXES: Final = ("/_app/", "/apple-", "/favicon", "/manifest", "/maskable-", "/pwa-", "/workbox")
# No segment begins with a dot, so that no path leaves the files.
_PATH: Final = re.compile(r"/(?:[\w-][\w.-]*(?:/[\w-][\w.-]*)*)?", re.ASCII)
_PASSED: Final = ("Accept-Encoding", "If-None-Match")
# Fields of the engine's header. Cookies and storage belong to a host with all its ports, so fields
# that change them would change the dashboard's.
_PASSED_BACK: Final = (
    "Cache-Control", "Content-Encoding", "Content-Length", "Content-Type", "ETag", "Vary",
)  # fmt: skip
_HEADERS: Final[Mapping[str, str]] = {
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class EngineUiAccess(Access):
    """Requires a key for everything except the files; has no sessions."""

    def is_open(self, request: web.BaseRequest) -> bool:
        is_file = request.path in _EXACT or request.path.startswith(_PREFIXES)
        return is_file or super().is_open(request)

    def key_of(self, request: web.BaseRequest) -> Key | None:
        if request.path.startswith(PREFIX):
            raise NotFound("the dashboard is at the address of the proxy alone")
        return super().key_of(request)


class EngineUi(Feature):
    def __init__(self, core: Core) -> None:
        self._core = core
        self.address, self.is_at_main_address = core.settings.engine_ui, False
        self.access = EngineUiAccess(core.keys)

    def add_routes(self, routes: Routes) -> None:
        for path in _EXACT:
            routes.add(path, get=self.file)
        for prefix in _PREFIXES:
            routes.add(prefix + "{id}", get=self.file)

    async def file(self, request: web.BaseRequest) -> web.StreamResponse:
        """Relay a file of an engine.

        Raises:
            NotFound: The engine has no such file, or no web UI.
            Unavailable: No model is loaded here.
            UpstreamFailed: The engine failed.
        """
        path = request.rel_url.raw_path
        if not _PATH.fullmatch(path):
            raise NotFound("there is no such file")
        upstream = self._engine()
        passed = {name: request.headers[name] for name in _PASSED if name in request.headers}
        wanted = get_request(path, **passed)
        async with UpstreamResponse(upstream, wanted, self._core.settings) as found:
            if found.status == HTTPStatus.NOT_FOUND:
                raise NotFound(f"the engine of {upstream.model} has no web UI with this file")
            return await relay(request, found, _PASSED_BACK, _HEADERS)

    def _engine(self) -> Upstream:
        """Return an engine in service, always the same, because files differ between builds."""
        instances = (found for found in self._core.router.instances() if found.in_service)
        here = (instance.upstream for instance in instances)
        own = sorted((upstream.name, upstream) for upstream in here if upstream.node is None)
        if not own:
            raise Unavailable(
                "the web UI is part of an engine, and no model is loaded; `corral load` loads one"
            )
        return own[0][1]
