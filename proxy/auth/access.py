"""What a request may do: by its API key, or by a session of the dashboard.

A session counts below `/corral/v1/` alone, for requests of the page itself: their origin must be
the address that they are sent to, and they have the page token beside the cookie. `SameSite` does
not say so much: all ports of a host are one site, and get one cookie.
"""

from __future__ import annotations

from typing import Final

from aiohttp import web

from proxy.auth.api_keys import KEY, OPEN_PATHS, ApiKeys
from proxy.auth.keys_file import Key
from proxy.auth.origin import is_same_origin
from proxy.auth.sessions import PAGE_TOKEN, Sessions, SignedIn, session_id_of
from proxy.errors import Forbidden, SessionRequired, UnsupportedMediaType

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
_PAGE_PATHS: Final = frozenset({ROOT, PREFIX, "/corral/", SESSION, END_SESSION})
# Health probes, and what other machines read all the time, do not count for the limits of a key. Of
# a session's requests, only chats do.
# Tells another llama-corral which prompts the caches hold.
PREFIXES: Final = "/corral/v1/prefixes"
UNCOUNTED: Final = OPEN_PATHS | {PREFIXES}
# Each of their prompts is admitted by itself.
WITH_PARTS: Final = frozenset({BATCH_COMPLETIONS, BATCH_TOKENIZE})
_READS: Final = frozenset({"GET", "HEAD"})

# None: the request has none.
SIGNED_IN: Final[web.RequestKey[SignedIn | None]] = web.RequestKey("signed_in", SignedIn)


class Access:
    """`sessions` is None where there is no dashboard."""

    def __init__(self, keys: ApiKeys, sessions: Sessions | None = None) -> None:
        self.keys = keys
        self._sessions = sessions

    def is_open(self, request: web.BaseRequest) -> bool:
        """Whether it needs no key."""
        if request.path in OPEN_PATHS:
            return True
        return self._sessions is not None and is_page(request)

    def key_of(self, request: web.BaseRequest) -> Key | None:
        """The key that the request has, or its session stands for; None if none is needed.

        Raises:
            Unauthorized: It has none that is valid, or a session's cookie without its page token.
            Forbidden: Another page makes use of the session.
            UnsupportedMediaType: It changes something, and its body is not JSON.
        """
        if request.path.startswith(API) and (signed_in := self._signed_in(request)):
            check_same_origin(request)
            request[SIGNED_IN] = signed_in
            return signed_in.client
        return self.keys.key_of(request)

    def _signed_in(self, request: web.BaseRequest) -> SignedIn | None:
        if self._sessions is None or (session_id := session_id_of(request)) is None:
            return None
        return self._sessions.use(session_id, request.headers.get(PAGE_TOKEN, ""))


def is_page(request: web.BaseRequest) -> bool:
    """Whether it is for the page and its files, which hold no data, or to sign in or out."""
    path = request.rel_url.path_safe
    return path in _PAGE_PATHS or path.startswith((PAGE, LIBRARIES))


def check_same_origin(request: web.BaseRequest) -> None:
    """Check that the page itself sent a request.

    Raises:
        Forbidden: Another page did.
        UnsupportedMediaType: It changes something, and its body is not JSON.
    """
    if not is_same_origin(request):
        raise Forbidden(
            "only the dashboard's own page may use its session; other programs send an API key"
        )
    if request.method not in _READS and request.content_type != "application/json":
        raise UnsupportedMediaType("the body must be JSON, with Content-Type: application/json")


def check_admin(request: web.BaseRequest) -> Key:
    """Return the admin's key that the request has or its session stands for.

    Raises:
        SessionRequired: It has neither.
        Forbidden: Its key is not an admin's.
    """
    key = request[KEY]
    if key is None:
        raise SessionRequired
    if not key.admin:
        raise Forbidden(f"API key {key.name!r} is not an admin's (admin = true in the keys file)")
    return key
