"""Admits the work of API keys, whichever way it comes.

A request over HTTP counts against `requests_per_minute` and `max_in_flight` when it arrives. Each
line of a batch and each prompt of `/v1/batch/completions` counts as a request too. Whatever has a
prompt computed reserves its tokens first.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager

from proxy.auth.api_keys import ApiKeys
from proxy.auth.keys_file import Key
from proxy.auth.rate_limit import RateLimiter
from proxy.auth.token_limits import TokenLimits
from proxy.errors import KeyLimited


class Admission:
    """Of all addresses together.

    Attributes:
        keys: Whose `limited` are to reserve tokens.
        tokens: What keys have spent of their tokens.
    """

    def __init__(self, keys: ApiKeys, clock: Callable[[], float] = time.monotonic) -> None:
        self.tokens = TokenLimits()
        self.keys = keys
        self._clock = clock
        self._rate = RateLimiter(clock)

    def headers(self, key: Key) -> Mapping[str, str]:
        """Header fields of a response that say what a key has left."""
        return self.tokens.headers(key) if key.name in self.keys.limited else {}

    def request(self, key: Key, *, has_parts: bool = False) -> AbstractContextManager[None]:
        """Count a request for the length of the block.

        One that has parts is in flight by these alone. Raises KeyLimited.
        """
        return self._rate.holding(key, in_flight=0 if has_parts else 1)

    @asynccontextmanager
    async def part(
        self, client: str, *, requests: int = 1, wait_s: float = 0.0
    ) -> AsyncIterator[None]:
        """Count a part of a request, or a line of a batch, for the length of the block.

        Args:
            client: The name of its key; any other has no limits.
            requests: How many it counts as in a minute, 0 or 1.
            wait_s: How long it may wait until its key has less in flight, or a minute is over.

        Raises:
            KeyLimited: The key is at its limits, and that lasts longer.
        """
        until_s = self._clock() + wait_s
        with ExitStack() as held:
            if key := self.keys.named(client):
                while True:
                    try:
                        held.enter_context(self._rate.holding(key, requests=requests))
                        break
                    except KeyLimited as error:
                        pause_s = error.retry_after_s or 1
                        if self._clock() + pause_s > until_s:
                            raise
                    await self._rate.wait(key, pause_s)
            yield
