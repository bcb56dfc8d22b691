"""Sessions of the dashboard, and the one-time tokens that open them. Both end with the process.

Only hashes of them are kept. A session has an id, for the cookie, and a page token, for the header:
other programs of the host can read the cookie, so it is nothing without the token. A one-time token
comes from the control socket, so its bearer is this user; an admin's API key opens a session too,
which ends with that key.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from proxy.auth.api_keys import ApiKeys
from proxy.auth.keys_file import Key
from proxy.errors import SessionTokenRequired

TOKEN_LIFE_S: Final = 60.0
IDLE_MAX_S: Final = 12 * 3600.0
LIFE_MAX_S: Final = 7 * 86_400.0
_RANDOM_BYTES: Final = 32
# More of them end the oldest.
_TOKENS_MAX: Final = 16
_SESSIONS_MAX: Final = 64
# Not a name that a keys file may have.
_OWNER: Final = Key("(dashboard)", b"", admin=True)


@dataclass(slots=True)
class Session:
    """`key` is the name of the API key that opened it; None: a token did."""

    key: str | None
    page_digest: bytes
    began_at_s: float
    used_at_s: float

    @property
    def ends_at_s(self) -> float:
        return min(self.began_at_s + LIFE_MAX_S, self.used_at_s + IDLE_MAX_S)


@dataclass(frozen=True, slots=True)
class NewSession:
    """What the browser gets of a session: an id for its cookie, a token for the page."""

    session_id: str
    page_token: str


@dataclass(frozen=True, slots=True)
class SignedIn:
    """A request's session: whose it is, and how long it lasts without another request."""

    client: Key
    expires_in_s: float


class Sessions:
    def __init__(self, keys: ApiKeys, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys = keys
        self._clock = clock
        self._tokens: dict[bytes, float] = {}  # until when each is valid
        self._sessions: dict[bytes, Session] = {}  # unused longest first

    def new_token(self) -> str:
        """Return a token that opens one session, within a minute."""
        self._expire_tokens()
        token = secrets.token_urlsafe(_RANDOM_BYTES)
        _bound(self._tokens, _TOKENS_MAX)
        self._tokens[_digest(token)] = self._clock() + TOKEN_LIFE_S
        return token

    def redeem(self, token: str) -> NewSession | None:
        """Use a token up, and return a new session; None: it is not valid."""
        self._expire_tokens()
        return self._open(None) if self._tokens.pop(_digest(token), None) else None

    def open_for(self, key: Key) -> NewSession:
        """Return a new session of an admin's key."""
        return self._open(key.name)

    def use(self, session_id: str, page_token: str) -> SignedIn | None:
        """Return whose session it is, and count that as its use; None: it is over.

        Raises:
            SessionTokenRequired: The page token is not that of the session, which stays as it was.
        """
        digest, now_s = _digest(session_id), self._clock()
        session = self._sessions.get(digest)
        if session is None:
            return None
        if session.ends_at_s <= now_s:
            del self._sessions[digest]
            return None
        if not hmac.compare_digest(_digest(page_token), session.page_digest):
            raise SessionTokenRequired
        del self._sessions[digest]
        client = self._keys.named(session.key) if session.key else _OWNER
        if client is None or not client.admin:
            return None
        session.used_at_s = now_s
        self._sessions[digest] = session
        return SignedIn(client, session.ends_at_s - now_s)

    def end(self, session_id: str) -> None:
        self._sessions.pop(_digest(session_id), None)

    def _open(self, key: str | None) -> NewSession:
        new = NewSession(secrets.token_urlsafe(_RANDOM_BYTES), secrets.token_urlsafe(_RANDOM_BYTES))
        now_s = self._clock()
        _bound(self._sessions, _SESSIONS_MAX)
        self._sessions[_digest(new.session_id)] = Session(
            key, _digest(new.page_token), now_s, now_s
        )
        return new

    def _expire_tokens(self) -> None:
        now_s = self._clock()
        self._tokens = {one: until_s for one, until_s in self._tokens.items() if until_s > now_s}


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def _bound(table: dict[bytes, Any], most: int) -> None:
    """Make room for one more entry."""
    while len(table) >= most:
        del table[next(iter(table))]
