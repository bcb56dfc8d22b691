"""Signing in and out: a one-time token, or an admin's API key, for a session.

Its id is in a cookie, its page token in the answer.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from proxy.auth.access import END_SESSION, SESSION, SIGNED_IN, check_same_origin
from proxy.auth.api_keys import ApiKeys
from proxy.auth.keys_file import Key
from proxy.auth.session_cookie import PAGE_TOKEN, delete_cookie, session_id_of, set_cookie
from proxy.auth.sessions import NewSession, Sessions, SignedIn
from proxy.auth.sign_in_limit import SignInLimit
from proxy.body.bodies import Bodies
from proxy.dashboard.small_body import read_members
from proxy.errors import BadRequest, Forbidden, InvalidToken, Unauthorized
from proxy.json_response import json_response
from proxy.routes import Routes


class SessionEndpoint:
    def __init__(self, sessions: Sessions, keys: ApiKeys, bodies: Bodies) -> None:
        self._sessions = sessions
        self._keys = keys
        self._bodies = bodies
        self._limit = SignInLimit()

    def add_routes(self, routes: Routes) -> None:
        routes.add(SESSION, get=self.show, post=self.begin)
        routes.add(END_SESSION, post=self.end)

    async def show(self, request: web.BaseRequest) -> web.Response:
        """Raises SessionTokenRequired for a session's cookie without its page token."""
        if session_id := session_id_of(request):
            self._sessions.use(session_id, request.headers.get(PAGE_TOKEN, ""))
        return self._answer(request[SIGNED_IN])

    async def begin(self, request: web.BaseRequest) -> web.Response:
        """Open a session, or sign one more tab in to that of the browser.

        Raises:
            InvalidToken: The token is not valid.
            Unauthorized: The API key is unknown.
            Forbidden: It is not an admin's, or another page asks.
            TooManyRequests: Too many wrong ones came from the address.
            ProxyError: As `read_members` and `check_same_origin` do.
        """
        check_same_origin(request)
        members = await read_members(request, self._bodies)
        try:
            new = self._opened(members, session_id_of(request))
        except Unauthorized:
            # A right one always signs in: who guesses must not lock out others behind one address.
            address = request.remote or ""
            self._limit.check(address)
            self._limit.note_failure(address)
            raise
        signed_in = self._sessions.use(new.session_id, new.page_token)
        response = self._answer(signed_in, page_token=new.page_token)
        set_cookie(request, response, new.session_id)
        return response

    async def end(self, request: web.BaseRequest) -> web.Response:
        """End the session, of all tabs.

        Raises SessionTokenRequired for a session's cookie without its page token.
        """
        check_same_origin(request)
        if session_id := session_id_of(request):
            self._sessions.use(session_id, request.headers.get(PAGE_TOKEN, ""))
            self._sessions.end(session_id)
        response = self._answer(None)
        delete_cookie(request, response)
        return response

    def _opened(self, members: dict[str, Any], session_id: str | None) -> NewSession:
        match members:
            case {"token": str(token)}:
                if (new := self._sessions.redeem(token, session_id)) is None:
                    raise InvalidToken
                return new
            case {"api_key": str(api_key)}:
                return self._sessions.open_for(self._admin(api_key), session_id)
        raise BadRequest('send {"token": TOKEN} or {"api_key": KEY}')

    def _admin(self, api_key: str) -> Key:
        key = self._keys.with_text(api_key)
        if key is None:
            raise Unauthorized("unknown API key; check it against `corral key list`")
        if not key.admin:
            raise Forbidden(f"API key {key.name!r} is not an admin's (admin = true in its file)")
        return key

    def _answer(self, signed_in: SignedIn | None, **more: str) -> web.Response:
        content: dict[str, object] = {
            "signed_in": signed_in is not None,
            "has_keys": self._keys.are_needed,
            **more,
        }
        if signed_in:
            content |= {
                "client": signed_in.client.name,
                "expires_in_s": round(signed_in.expires_in_s),
            }
        return json_response(content)
