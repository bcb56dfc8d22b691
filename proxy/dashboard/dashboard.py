"""The dashboard: its page, the page's commands, signing in and out.

The page's files hold no data, so they need no key. They are read once: the files of this package
and the libraries that it uses. The path of a request is only looked up in this table and never
becomes a file's path.

The page sends commands on models, forgets conversations, and reads logs and settings of client
programs; its view of the models on this machine is in `machine_models`, searches and downloads are
in `hub`, comparisons of profiles in `bench`, the editor of the settings is in `settings_file`.
Signing in exchanges a one-time token, or an admin's API key, for a session: its id is in a cookie,
its page token in the answer.

Source: W3C Content Security Policy Level 3; WHATWG Fetch, section 3.7 on
`Cross-Origin-Resource-Policy`.
"""

from __future__ import annotations

import asyncio
import hashlib
import tomllib
from collections.abc import Iterator, Mapping
from functools import cached_property
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Final, NoReturn, get_args

from aiohttp import web
from attrs import define, field

from proxy import errors
from proxy.auth import access, sessions
from proxy.auth.api_keys import KEY, SignInLimit
from proxy.auth.auth_proxy import USER
from proxy.auth.keys_file import Key
from proxy.common.background_tasks import persist
from proxy.dashboard.bench import BenchEndpoint
from proxy.dashboard.host import DashboardHost, Verb
from proxy.dashboard.hub import HubEndpoint
from proxy.dashboard.live import LiveEndpoint, LiveState, lines_of
from proxy.dashboard.machine_models import MachineModelsEndpoint
from proxy.dashboard.settings_file import SettingsFileEndpoint
from proxy.dashboard.state import INTERVAL_S
from proxy.endpoints.feature import Core, Feature
from proxy.endpoints.requests import Requests
from proxy.http.body import read_members
from proxy.http.middleware import PATH_ID, Handler, Routes, json_response
from proxy.request.models import client_models
from proxy.request.request import client_of

INDEX: Final = "index.html"
_TYPES: Final[Mapping[str, str]] = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".mjs": "text/javascript; charset=utf-8",
    ".png": "image/png",
    ".svg": "image/svg+xml; charset=utf-8",
}


StaticFile = tuple[bytes, str, str]  # body, Content-Type, ETag


def page_files() -> Mapping[str, StaticFile]:
    folder = resources.files(__package__).joinpath("page")
    return {path: file for path, entry in _walk_files(folder, "") if (file := _file(path, entry))}


def library_files(vendor: Path) -> Mapping[str, StaticFile]:
    """Return the files that `page.toml` in this folder lists, by `NAME/FILE`."""
    listed = vendor / "page.toml"
    if not listed.is_file():
        return {}
    libraries = tomllib.loads(listed.read_text("utf-8"))["libraries"]
    paths = [f"{library['name']}/{name}" for library in libraries for name in library["files"]]
    return {path: file for path in paths if (file := _file(path, vendor / path))}


def _walk_files(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _walk_files(entry, f"{prefix}{entry.name}/")
        else:
            yield prefix + entry.name, entry


def _file(path: str, entry: Traversable) -> StaticFile | None:
    if (content_type := _TYPES.get(Path(path).suffix)) is None:
        return None
    body = entry.read_bytes()
    return body, content_type, f'"{hashlib.sha256(body).hexdigest()[:32]}"'


_POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS: Final[Mapping[str, str]] = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
_MAX_BYTES: Final = 4096  # of a body that signs in
_LINES: Final = 500  # of a log
_FILES_MAX: Final = 200


# For a client that knows only the address; the documentation has all endpoints.
_ENDPOINTS: Final = {
    "models": "/v1/models",
    "chat": "/v1/chat/completions",
    "messages": "/v1/messages",
    "health": "/health",
    "metrics": "/metrics",
    "dashboard": "/corral/",
}


@define(eq=False, slots=False)
class Dashboard(Feature):
    """The page, its sessions, and for admins commands, logs and the settings of clients.

    The page's files are read at the first request. `chat` answers the chats of the page.
    """

    _core: Core
    _host: DashboardHost
    _sessions: sessions.Sessions
    _access: access.Access
    _requests: Requests
    _chat: Handler
    _limit: SignInLimit = field(factory=SignInLimit, init=False)

    def __attrs_post_init__(self) -> None:
        self._live = LiveState(self._host, self._core, self._requests)

    def add_routes(self, routes: Routes) -> None:
        routes.add(access.ROOT, get=self.root)
        routes.add("/corral", get=self.redirect)
        routes.add("/corral/", get=self.index)
        routes.add(access.PAGE + "{id}", get=self.page)
        routes.add(access.LIBRARIES + "{id}", get=self.library)
        routes.add(access.SESSION, get=self.show_session, post=self.begin_session)
        routes.add(access.END_SESSION, post=self.end_session)
        LiveEndpoint(self._live, self._host, self._core, self._is_admin).add_routes(routes)
        MachineModelsEndpoint(self._host.machine_models, self._core).add_routes(routes)
        BenchEndpoint(self._host.bench, self._core).add_routes(routes)
        HubEndpoint(self._host.hub, self._core).add_routes(routes)
        SettingsFileEndpoint(self._host.settings_file, self._core).add_routes(routes)
        for verb in get_args(Verb):
            routes.add(f"/corral/v1/models/{{id}}/{verb}", post=self._command(verb))
        routes.add("/corral/v1/caches", get=self.caches)
        routes.add("/corral/v1/caches/{id}/forget", post=self.forget)
        routes.add("/corral/v1/logs", get=self.logs)
        routes.add("/corral/v1/logs/{id}", get=self.log)
        routes.add("/corral/v1/clients", get=self.clients)
        routes.add(access.CHAT, post=self._chat)

    async def run(self) -> None:
        await persist("dashboard", self._sample)

    async def _sample(self) -> NoReturn:
        while True:
            self._live.sample()
            await asyncio.sleep(INTERVAL_S)

    def _is_admin(self, request: web.BaseRequest) -> bool:
        try:
            key = self._access.key_of(request)
        except errors.ProxyError:
            return False
        return key is not None and key.admin

    # The page.

    async def root(self, request: web.BaseRequest) -> web.Response:
        """Redirect a browser to the page; name the endpoints to other clients."""
        if "text/html" in request.headers.get("Accept", ""):
            return await self.redirect(request)
        return json_response({"name": "llama-corral", "endpoints": _ENDPOINTS})

    async def redirect(self, _: web.BaseRequest) -> web.Response:
        """Redirect to the page's folder, because its links are relative to it."""
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
        return library_files(self._host.vendor)

    # Commands, caches, logs and settings of clients.

    def _command(self, verb: Verb) -> Handler:
        async def begin(request: web.BaseRequest) -> web.Response:
            """Begin a command; the state shows its progress.

            Raises:
                SessionRequired, Forbidden: The request is not an admin's.
                UnknownModel: There is no such model.
                BadRequest: The model is on another machine.
            """
            access.check_admin(request)
            model = self._local_model_id(request)
            self._host.command(verb, model)
            return json_response({"model": model, "verb": verb})

        return begin

    async def caches(self, request: web.BaseRequest) -> web.Response:
        """Answer with the files of conversations on disk: their sums, and the latest used."""
        access.check_admin(request)
        files = self._host.slot_files()
        size_bytes = sum(file.size_bytes for file in files)
        latest = files[:_FILES_MAX]
        return json_response({"count": len(files), "size_bytes": size_bytes, "files": latest})

    async def forget(self, request: web.BaseRequest) -> web.Response:
        """Delete the caches of the conversation of a file; raises NotFound."""
        access.check_admin(request)
        return json_response(await self._host.forget(request[PATH_ID]))

    async def logs(self, request: web.BaseRequest) -> web.Response:
        access.check_admin(request)
        return json_response({"sources": self._host.log_sources()})

    async def log(self, request: web.BaseRequest) -> web.Response:
        access.check_admin(request)
        source = request[PATH_ID]
        lines = await self._host.log_tail(source, lines_of(request, _LINES))
        return json_response({"source": source, "lines": lines})

    async def clients(self, request: web.BaseRequest) -> web.Response:
        """Answer with the settings of client programs; raises UnknownModel."""
        access.check_admin(request)
        url, needs_key = self._core.server_state.url, self._core.keys.are_needed
        found = await self._host.clients(request.query.get("model"), url, needs_key=needs_key)
        urls = {"openai": f"{url}/v1", "anthropic": url}
        return json_response({**found, "needs_key": needs_key, "urls": urls})

    def _local_model_id(self, request: web.BaseRequest) -> str:
        name, models = request[PATH_ID], client_models(self._core.loader, request)
        info = next((model for model in models if model.id == name), None)
        if info is None:
            raise errors.UnknownModel(name, [model.id for model in models])
        if not info.is_local:
            raise errors.BadRequest(f"{name} is a model of another machine; control it there")
        return name

    # Sessions.

    async def show_session(self, request: web.BaseRequest) -> web.Response:
        """Show the session; raises SessionTokenRequired for its cookie without its page token."""
        if session_id := sessions.session_id_of(request):
            self._sessions.use(session_id, request.headers.get(sessions.PAGE_TOKEN, ""))
        key = request[KEY]
        is_user = key is not None and key.name.startswith(USER)
        return self._session_answer(request.get(access.SIGNED_IN), key if is_user else None)

    async def begin_session(self, request: web.BaseRequest) -> web.Response:
        """Open a session, or sign in one more tab of the browser's session.

        Raises:
            InvalidToken: The token is not valid.
            Unauthorized: The API key is unknown.
            Forbidden: The key is not an admin's, or another page asks.
            TooManyRequests: Too many wrong keys or tokens came from the address.
            BadRequest: The body is larger than 4 KiB, or has no Content-Length.
            ProxyError: See `read_members` and `check_same_origin`.
        """
        access.check_same_origin(request)
        if request.content_length is None or request.content_length > _MAX_BYTES:
            raise errors.BadRequest(
                f"the body needs a Content-Length of at most {_MAX_BYTES} bytes"
            )
        with self._core.bodies.share(client_of(request)) as share:
            members = await read_members(request, share)
        try:
            session_id, page_token = self._open_session(members, sessions.session_id_of(request))
        except errors.Unauthorized:
            # A correct one always signs in, so an attacker cannot lock out others at the same
            # address.
            address = request.remote or ""
            self._limit.check(address)
            self._limit.note_failure(address)
            raise
        signed_in = self._sessions.use(session_id, page_token)
        response = self._session_answer(signed_in, page_token=page_token)
        sessions.set_cookie(request, response, session_id)
        return response

    async def end_session(self, request: web.BaseRequest) -> web.Response:
        """End the session of all tabs.

        Raises SessionTokenRequired for a session's cookie without its page token.
        """
        access.check_same_origin(request)
        if session_id := sessions.session_id_of(request):
            self._sessions.use(session_id, request.headers.get(sessions.PAGE_TOKEN, ""))
            self._sessions.end(session_id)
        response = self._session_answer(None)
        sessions.delete_cookie(request, response)
        return response

    def _open_session(self, members: dict[str, Any], session_id: str | None) -> tuple[str, str]:
        match members:
            case {"token": str(token)}:
                if (new := self._sessions.redeem(token, session_id)) is None:
                    raise errors.InvalidToken
                return new
            case {"api_key": str(api_key)}:
                return self._sessions.open_for(self._admin(api_key), session_id)
        raise errors.BadRequest('send {"token": TOKEN} or {"api_key": KEY}')

    def _admin(self, api_key: str) -> Key:
        key = self._core.keys.with_text(api_key)
        if key is None:
            raise errors.Unauthorized("unknown API key; check it against `corral key list`")
        if not key.admin:
            raise errors.Forbidden(
                f"API key {key.name!r} is not an admin's (admin = true in its file)"
            )
        return key

    def _session_answer(
        self, signed_in: sessions.SignedIn | None, user: Key | None = None, **more: str
    ) -> web.Response:
        """Answer with a session, or with the `user` that a reverse proxy has signed in."""
        content: dict[str, object] = {
            "signed_in": signed_in is not None or (user is not None and user.admin),
            "has_keys": self._core.keys.are_needed,
            **more,
        }
        if user:
            content["client"] = user.name
        if signed_in:
            content |= {
                "client": signed_in.client.name,
                "expires_in_s": round(signed_in.expires_in_s),
            }
        return json_response(content)


def _answer(request: web.BaseRequest, file: StaticFile | None) -> web.Response:
    if file is None:
        raise errors.NotFound("the dashboard has no such file; its page is /corral/")
    body, content_type, etag = file
    headers = {**_HEADERS, "ETag": etag}
    if etag in request.headers.get("If-None-Match", ""):
        return web.Response(status=304, headers=headers)
    return web.Response(body=body, headers={**headers, "Content-Type": content_type})
