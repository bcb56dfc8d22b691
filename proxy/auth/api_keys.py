"""Finds the API key of a request; reloads the keys file when it changes.

A key that is removed from the file is rejected from the next check on. If the file becomes
unreadable, the keys stay as they were and one event reports it.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from aiohttp import web

from proxy.auth.keys_file import FileVersion, Key, file_version, read_keys
from proxy.errors import ConfigError, Unauthorized
from proxy.observe.record import Emit

# None: the request needs no key.
KEY: Final[web.RequestKey[Key | None]] = web.RequestKey("key", Key)

# Need no key.
LIVE: Final = "/health/live"
OPEN_PATHS: Final = frozenset({"/health", "/v1/health", LIVE})
_BEARER: Final = re.compile(r"bearer +(\S+) *", re.IGNORECASE)
_RECHECK_S: Final = 1.0


class ApiKeys:
    """The valid keys: those of the file, and one that is in none. Raises ConfigError.

    Without both, no request needs a key.

    Attributes:
        limited: The keys of the file with limits of tokens, by name.
    """

    def __init__(
        self,
        path: Path | None,
        emit: Emit,
        clock: Callable[[], float] = time.monotonic,
        *,
        own_key: Key | None = None,
    ) -> None:
        self.limited: Mapping[str, Key] = {}
        self._path = path
        self._own_keys = (own_key,) if own_key else ()
        self._emit = emit
        self._clock = clock
        self._keys: tuple[Key, ...] = ()
        self._version: FileVersion | None = None
        if path is not None:
            self._read(path)
        self._checked_at_s = clock()

    @property
    def are_needed(self) -> bool:
        return bool(self._own_keys) or self._path is not None

    def find_key(self, name: str) -> Key | None:
        """The key of this name; None where there is none, or no more."""
        return next((key for key in self._current() if key.name == name), None)

    def with_text(self, text: str) -> Key | None:
        """The key with this text; None where there is none."""
        return find(text, self._current())

    def key_of(self, request: web.BaseRequest) -> Key | None:
        """None if no keys are configured. Raises Unauthorized."""
        if not self.are_needed:
            return None
        key = self.with_text(_key_of_request(request))
        if key is None:
            raise Unauthorized("unknown API key; check it against `corral key list`")
        return key

    def _current(self) -> tuple[Key, ...]:
        if self._path is not None:
            self._reload_if_changed(self._path)
        return (*self._own_keys, *self._keys)

    def _read(self, path: Path) -> None:
        self._keys, self._version = read_keys(path)
        self.limited = {key.name: key for key in self._keys if key.limits_tokens}

    def _reload_if_changed(self, path: Path) -> None:
        now_s = self._clock()
        if now_s - self._checked_at_s < _RECHECK_S:
            return
        self._checked_at_s = now_s
        version = file_version(path)
        if version == self._version:
            return
        self._version = version
        try:
            self._read(path)
        except ConfigError as error:
            self._emit("settings.rejected", reason=f"the API keys are unchanged: {error.message}")


def find(given: str, keys: Iterable[Key]) -> Key | None:
    """The key with this text. Compares all keys in constant time, so timing reveals none."""
    digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
    found = None
    for key in keys:
        if hmac.compare_digest(digest, key.digest):
            found = key
    return found


def visible_client(request: web.BaseRequest) -> str | None:
    """The client whose requests alone this one may see; None: it may see all."""
    key = request[KEY]
    return None if key is None or key.admin else key.name


def _key_of_request(request: web.BaseRequest) -> str:
    given = {key.strip() for key in request.headers.getall("X-Api-Key", ())}
    for field in request.headers.getall("Authorization", ()):
        bearer = _BEARER.fullmatch(field)
        if bearer is None:
            raise Unauthorized("invalid Authorization header; send Authorization: Bearer KEY")
        given.add(bearer[1])
    given.discard("")
    if len(given) > 1:
        raise Unauthorized("the request has two different API keys; send only one")
    if not given:
        raise Unauthorized("the request has no API key; send Authorization: Bearer KEY")
    return given.pop()
