"""Requests that engines computed when they crashed; after the second crash one is refused a while.

A request is recognised by path, model and body, without members that change between retries. Which
of several requests caused a crash is not known: all are suspects, and one that completes is
cleared.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import orjson
from xxhash import xxh3_128_digest

from proxy.errors import CrashesEngine

if TYPE_CHECKING:
    from proxy.request.request import ProxyRequest
    from proxy.router.lease import Clock

_REFUSED_FROM: Final = 2
_SUSPECTS_MAX: Final = 1024
# What a client may change without the engine computing anything else.
_ASIDE: Final = frozenset(
    {
        "cache_prompt",
        "id_slot",
        "metadata",
        "model",
        "return_progress",
        "seed",
        "service_tier",
        "store",
        "stream",
        "stream_options",
        "timings_per_token",
        "user",
    }
)


@dataclass(slots=True)
class _Suspect:
    crashes: int
    at_s: float


class CrashSuspects:
    """What is remembered of such requests: 1024 of them, the latest.

    Args:
        clock: Monotonic time.
        memory_s: How long one is remembered after its last crash, and refused after its second.
    """

    def __init__(self, clock: Clock, memory_s: float) -> None:
        self._clock = clock
        self._memory_s = memory_s
        self._suspects: OrderedDict[bytes, _Suspect] = OrderedDict()

    def check(self, request: ProxyRequest) -> None:
        """Raise CrashesEngine where engines crashed twice while they computed a request."""
        if not self._suspects:  # so that nothing is hashed as long as no engine crashes
            return
        self._forget_old()
        suspect = self._suspects.get(fingerprint(request))
        if suspect and suspect.crashes >= _REFUSED_FROM:
            rest_s = math.ceil(suspect.at_s + self._memory_s - self._clock())
            raise CrashesEngine(
                f"{suspect.crashes} engines of {request.model} crashed while computing this "
                f"request; it is refused for {rest_s} s more: change it, or retry later"
            )

    def crashed(self, requests: Iterable[ProxyRequest]) -> None:
        """Note that an engine crashed while it computed requests; equal ones count once."""
        for key in {fingerprint(request) for request in requests}:
            before = self._suspects.pop(key, None)
            crashes = before.crashes + 1 if before else 1
            self._suspects[key] = _Suspect(crashes, self._clock())
        while len(self._suspects) > _SUSPECTS_MAX:
            self._suspects.popitem(last=False)

    def clear(self, request: ProxyRequest) -> None:
        if self._suspects:
            self._suspects.pop(fingerprint(request), None)

    def _forget_old(self) -> None:
        while self._suspects:
            key, oldest = next(iter(self._suspects.items()))
            if self._clock() - oldest.at_s < self._memory_s:
                return
            del self._suspects[key]


def fingerprint(request: ProxyRequest) -> bytes:
    """Return the hash by which a request is recognised: 16 bytes."""
    return xxh3_128_digest(f"{request.path}\0{request.model}\0".encode() + _content(request))


def _content(request: ProxyRequest) -> bytes:
    if request.form:  # its boundary is another each time
        return request.body.replace(request.form.boundary.encode(), b"")
    kept = {name: value for name, value in request.json.items() if name not in _ASIDE}
    try:
        return orjson.dumps(kept, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # what can be read may lie deeper than what can be written
        return request.body
