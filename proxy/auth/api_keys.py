"""API keys: read from a file, found by what a client sends, read again when the file changes.

    [keys.NAME]
    sha256 = "64 hexadecimal digits"     or  key = "the key itself"
    max_in_flight = 4                    requests at once
    requests_per_minute = 60
    models = ["qwen3"]                   those it may use; all where not said
    priority = "batch"                       its requests let all others go first

The file must belong to us or to root and be closed to everybody else, as ssh has it. While we run
it is looked at again at most once a second: a key that is taken out of it is refused from then on.
A file that cannot be read any more leaves the keys as they were, and that is told once.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from aiohttp import web

from proxy.access_log import Emit
from proxy.auth.keys_file import FileVersion, Key, file_version, read_keys
from proxy.errors import ConfigError, Unauthorized
from proxy.models import ModelInfo

KEY: Final = web.RequestKey("key", Key)

OPEN_PAGES: Final = frozenset({"/health", "/v1/health"})
_BEARER: Final = re.compile(r"bearer +(\S+) *", re.IGNORECASE)
_LOOK_AGAIN_S: Final = 1.0
_NO_KEY: Final = "no API key came with the request; send Authorization: Bearer KEY"


class ApiKeys:
    """The keys that are taken; without a file, anybody may ask.

    Args:
        path: The file, or None.
        tell: Hears when the file cannot be read any more.
        clock: Monotonic seconds.

    Raises:
        ConfigError: The file cannot be used.
    """

    def __init__(
        self, path: Path | None, tell: Emit, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._path = path
        self._tell = tell
        self._clock = clock
        self._keys: tuple[Key, ...] = ()
        self._mark: FileVersion | None = None
        if path is not None:
            self._keys, self._mark = read_keys(path)
        self._looked_at_s = clock()

    def key_of(self, request: web.Request) -> Key | None:
        """Return the key that a request came with; None where no keys are set.

        Raises:
            Unauthorized: It came with none, with two, or with one that is not known.
        """
        if self._path is None:
            return None
        self._look_again(self._path)
        key = find(_given(request), self._keys)
        if key is None:
            raise Unauthorized("the API key that came with the request is not one of ours")
        return key

    def _look_again(self, path: Path) -> None:
        """Take the file in again where it has changed; a stat of it costs a microsecond."""
        now_s = self._clock()
        if now_s - self._looked_at_s < _LOOK_AGAIN_S:
            return
        self._looked_at_s = now_s
        mark = file_version(path)
        if mark == self._mark:
            return
        self._mark = mark
        try:
            self._keys, self._mark = read_keys(path)
        except ConfigError as error:
            self._tell(
                "settings.rejected", reason=f"the API keys stay as they were: {error.message}"
            )


def find(given: str, keys: Iterable[Key]) -> Key | None:
    """Return the key whose text was given, or None.

    All keys are compared, each in constant time: how long it takes says nothing of any of them.
    """
    digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
    found = None
    for key in keys:
        if hmac.compare_digest(digest, key.digest):
            found = key
    return found


def visible(model_infos: Sequence[ModelInfo], key: Key | None) -> Sequence[ModelInfo]:
    """Return the models that a key may use; for it, there are no others."""
    if key is None or key.models is None:
        return model_infos
    return [
        model_info
        for model_info in model_infos
        if key.models & {model_info.id, *model_info.aliases}
    ]


def _given(request: web.Request) -> str:
    """Return the one key that a request carries.

    Raises:
        Unauthorized: It carries none, or two that differ.
    """
    given = {key.strip() for key in request.headers.getall("X-Api-Key", ())}
    for said in request.headers.getall("Authorization", ()):
        bearer = _BEARER.fullmatch(said)
        if bearer is None:
            raise Unauthorized("Authorization is not Bearer and a key")
        given.add(bearer[1])
    given.discard("")
    if len(given) > 1:
        raise Unauthorized("two API keys came with the request; send one of them")
    if not given:
        raise Unauthorized(_NO_KEY)
    return given.pop()
