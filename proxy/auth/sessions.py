"""Manages sessions of the dashboard: the one-time tokens that open them, and their cookies.

Tokens and sessions end with the process, and only their hashes are kept. A session has an id, for
the cookie, and a page token, for the header: programs on other ports of the host can read the
cookie, so it is worthless without the token. A one-time token comes from the control socket, so its
bearer is this user; an admin's API key also opens a session, which ends with that key.

Browsers send a host's cookies to all of its ports, so the port is part of the cookie's name: two
daemons, or two tunnels to daemons, do not overwrite each other's cookies. Requests that another
site caused have no cookie. Source of `__Host-`: RFC 6265bis, section 4.1.3.2.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

from proxy.auth.api_keys import ApiKeys
from proxy.auth.keys_file import Key
from proxy.errors import SessionTokenRequired

TOKEN_LIFE_S: Final = 60.0
IDLE_MAX_S: Final = 12 * 3600.0
LIFE_MAX_S: Final = 7 * 86_400.0
_RANDOM_BYTES: Final = 32
# Above these numbers, the oldest ones end.
_TOKENS_MAX: Final = 16
_SESSIONS_MAX: Final = 64
_PAGES_MAX: Final = 16  # of one session
# A keys file cannot have this name.
OWNER: Final = Key("(dashboard)", b"", admin=True)


@dataclass(slots=True)
class Page:
    """One tab; `key` is the name of the API key that signed it in, None if a token did."""

    key: str | None
    began_at_s: float
    used_at_s: float

    @property
    def ends_at_s(self) -> float:
        return min(self.began_at_s + LIFE_MAX_S, self.used_at_s + IDLE_MAX_S)


@dataclass(frozen=True, slots=True)
class SignedIn:
    """A request's session: its client, and how long it lasts without another request."""

    client: Key
    expires_in_s: float


class Sessions:
    def __init__(self, keys: ApiKeys, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys = keys
        self._clock = clock
        self._tokens: dict[bytes, float] = {}  # until when each is valid
        # The pages of each session; unused longest first, as are the sessions.
        self._sessions: dict[bytes, dict[bytes, Page]] = {}

    def new_token(self) -> str:
        """Return a token that opens one session, within a minute."""
        self._expire_tokens()
        token = secrets.token_urlsafe(_RANDOM_BYTES)
        _make_room_in(self._tokens, _TOKENS_MAX)
        self._tokens[_digest(token)] = self._clock() + TOKEN_LIFE_S
        return token

    def redeem(self, token: str, session_id: str | None = None) -> tuple[str, str] | None:
        """Use up a token and return a session's id and a page token; None if it is not valid.

        `session_id` is the browser's cookie: an existing session of that id gets one more page.
        """
        self._expire_tokens()
        is_valid = self._tokens.pop(_digest(token), None) is not None
        return self._open(None, session_id) if is_valid else None

    def open_for(self, key: Key, session_id: str | None = None) -> tuple[str, str]:
        """Return a new session or page for an admin's key, as `redeem` does."""
        return self._open(key.name, session_id)

    def use(self, session_id: str, page_token: str) -> SignedIn | None:
        """Return the session and renew it; None if it is over.

        Raises:
            SessionTokenRequired: No page of the session has the token; the session stays as it was.
        """
        digest, page_digest, now_s = _digest(session_id), _digest(page_token), self._clock()
        pages = self._pages(digest)
        if pages is None:
            return None
        if page_digest not in pages:
            raise SessionTokenRequired
        page = pages.pop(page_digest)
        client = self._keys.find_key(page.key) if page.key else OWNER
        if client is None or not client.admin:
            return None
        page.used_at_s = now_s
        pages[page_digest] = page
        self._sessions[digest] = self._sessions.pop(digest)
        return SignedIn(client, page.ends_at_s - now_s)

    def _pages(self, digest: bytes) -> dict[bytes, Page] | None:
        now_s = self._clock()
        pages = self._sessions.pop(digest, {})
        if left := {name: page for name, page in pages.items() if page.ends_at_s > now_s}:
            self._sessions[digest] = left
        return left or None

    def end(self, session_id: str) -> None:
        self._sessions.pop(_digest(session_id), None)

    def _open(self, key: str | None, session_id: str | None) -> tuple[str, str]:
        page_token, now_s = secrets.token_urlsafe(_RANDOM_BYTES), self._clock()
        pages = self._pages(_digest(session_id)) if session_id else None
        if session_id is None or pages is None:
            session_id, pages = secrets.token_urlsafe(_RANDOM_BYTES), {}
            _make_room_in(self._sessions, _SESSIONS_MAX)
            self._sessions[_digest(session_id)] = pages
        _make_room_in(pages, _PAGES_MAX)
        pages[_digest(page_token)] = Page(key, now_s, now_s)
        return session_id, page_token

    def _expire_tokens(self) -> None:
        now_s = self._clock()
        tokens = self._tokens.items()
        self._tokens = {token: until_s for token, until_s in tokens if until_s > now_s}


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def _make_room_in(table: dict[bytes, Any], most: int) -> None:
    while len(table) >= most:
        del table[next(iter(table))]


PAGE_TOKEN: Final = "X-Corral-Session"  # noqa: S105 (the name of a header)
_PATH: Final = "/corral"
_HOST_PREFIX: Final = "__Host-"
_PORT: Final = re.compile(r":(\d{1,5})$")


def cookie_name(host: str) -> str:
    port = _PORT.search(host)
    return f"corral_session_{port[1]}" if port else "corral_session"


def session_id_of(request: web.BaseRequest) -> str | None:
    name = cookie_name(request.headers.get("Host", ""))
    # A GET through a reverse proxy does not show whether the proxy uses TLS.
    return request.cookies.get(_HOST_PREFIX + name) or request.cookies.get(name)


def is_https(request: web.BaseRequest) -> bool:
    """Return whether the browser uses TLS, to us or to a reverse proxy in front of us."""
    return request.secure or request.headers.get("Origin", "").lower().startswith("https://")


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
    """Browsers accept the prefix `__Host-` only with TLS and only for the path `/`."""
    name = cookie_name(request.headers.get("Host", ""))
    return (_HOST_PREFIX + name, "/") if is_https(request) else (name, _PATH)
