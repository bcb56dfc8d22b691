"""`/corral/v1/usage`: the usage of a client; for admins, and without API keys, of all clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final, Protocol

from aiohttp import web

from proxy.auth.api_keys import visible_client
from proxy.endpoints.feature import Core, Feature
from proxy.errors import BadRequest, Unavailable
from proxy.http.middleware import Routes, json_response

_PATH: Final = "/corral/v1/usage"
_NAMES: Final = frozenset({"by", "since", "key", "model"})


class UsageReader(Protocol):
    async def usage(
        self,
        *,
        by: str | None = None,
        since: str | None = None,
        key: str | None = None,
        model: str | None = None,
    ) -> Sequence[Mapping[str, Any]]:
        """Return the sums of usage, one entry per name; `key` is the client's own or an admin's.

        Raises BadRequest: a parameter is invalid; Unavailable: the files cannot be read.
        """


class UsageEndpoint(Feature):
    """The endpoint; today's recorded usage counts towards the token limits of keys."""

    def __init__(self, core: Core, reader: UsageReader) -> None:
        self._core = core
        self._reader = reader

    async def prepare(self) -> None:
        if not self._core.settings.api_keys_file:
            return
        day = f"{datetime.now().astimezone():%Y-%m-%d}"
        try:
            found = await self._reader.usage(by="key", since=day)
        except Unavailable as error:
            self._core.metrics.emit("usage.record_failed", reason=error.message)
        else:
            tokens = {usage["key"]: usage["total_tokens"] for usage in found}
            self._core.admission.tokens.restore(day, tokens)

    def add_routes(self, routes: Routes) -> None:
        routes.add(_PATH, get=self.usage)

    async def usage(self, request: web.BaseRequest) -> web.Response:
        given = dict(request.query)
        if unknown := sorted(given.keys() - _NAMES):
            names = ", ".join(sorted(_NAMES))
            raise BadRequest(f"unknown parameter {unknown[0]!r}; expected {names}")
        if (client := visible_client(request)) is not None:
            given["key"] = client
        found = await self._reader.usage(**given)
        return json_response({"usage": list(found)})
