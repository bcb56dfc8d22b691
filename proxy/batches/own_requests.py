"""Requests of the proxy itself, like a client's in everything but the connection.

Each waits in its model's queue, holds a lease, is retried if that is safe, and is counted and
written to the access log. Its answer is whole: a stream is assembled, and held until complete.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson
from multidict import CIMultiDict

from proxy import errors
from proxy.cache.prompt import ANYONE, CacheOwner
from proxy.endpoints.feature import Core
from proxy.forward.arrays import GATHERED_MAX_BYTES
from proxy.forward.forward import Forward
from proxy.forward.response import Response
from proxy.http.api_formats import format_of
from proxy.http.body import Share, check_complexity
from proxy.observe.record import CLIENT_GONE, AccessRecord, InFlightRequest, Timeline
from proxy.request.models import ModelNames
from proxy.request.request import ProxyRequest, encode_members, json_request
from proxy.router.lease import Lease
from proxy.upstream.endpoint_kinds import ENDPOINTS


class HeldResponse(Response):
    """The response to one request, held until its end.

    Nothing is sent before the end, so another instance can always take over. `status` is 0 before
    an instance has answered.
    """

    def __init__(self, record: AccessRecord, path: str, on_lease: Callable[[Lease], None]) -> None:
        super().__init__(record, format_of(path))
        self.status = 0
        self._on_lease = on_lease
        self._body = bytearray()

    @property
    def body(self) -> bytes:
        return bytes(self._body)

    def note_lease(self, lease: Lease) -> None:
        super().note_lease(lease)
        self._on_lease(lease)

    async def _send_header(self, status: int, _headers: CIMultiDict[str]) -> None:
        self.status = self.record.status = status
        self._body.clear()

    async def _send(self, chunk: bytes) -> None:
        self._body += chunk
        if len(self._body) > GATHERED_MAX_BYTES:
            raise errors.UpstreamFailed(f"the response is larger than {GATHERED_MAX_BYTES} bytes")

    async def _send_last(self, last: bytes) -> None:
        await self._send(last)
        self.record.count(self.body)


# Members that make a response a stream.
_STREAM_MEMBERS: Final = frozenset({"stream", "stream_options"})
_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OwnAnswer:
    """An answer; `body` is JSON, an error in the API's format if `status` is 400 or more."""

    status: int
    body: bytes
    # whole seconds after which a retry can succeed, None if unknown
    retry_after_s: int | None = None
    is_limited: bool = False  # whether its client's key has reached a limit


class OwnRequests:
    """Sends the proxy's own requests through the router."""

    def __init__(self, core: Core, forward: Forward) -> None:
        self._core = core
        self._forward = forward

    async def answer(  # noqa: PLR0913 (a client's request and its sender)
        self,
        path: str,
        members: Mapping[str, Any],
        *,
        client: str,
        names: ModelNames,
        request_id: str,
        requests: int = 1,
        limit_wait_s: float = 0.0,
        queue_timeout_s: float | None = None,
        is_from_proxy: bool = False,
        is_let_in: bool = False,
        owner: CacheOwner | None = None,
        on_lease: Callable[[Lease], None] = lambda _: None,
    ) -> OwnAnswer:
        """POST to one of llama-server's endpoints, with priority batch; errors are answers too.

        A drain of the server aborts it like a client's request; the caller decides whether it may
        begin during a drain.

        Args:
            members: The body; `stream` and `stream_options` are removed.
            client: Name of an API key, or an address.
            names: The models that the client may use.
            request_id: Id for the log and for the engine.
            requests: Number of requests that it counts as for its key's limits, 0 or 1.
            limit_wait_s: Time that it may wait for these limits.
            queue_timeout_s: Time that it may wait for a slot; None for the setting.
            is_from_proxy: Whether another llama-corral asks for it; then no node gets it.
            is_let_in: Whether the queue's limit does not apply, because the caller has a limit.
            owner: Owner of the caches that it uses; None for its key's.
            on_lease: Called each time that it gets a slot.
        """
        record = AccessRecord(request_id, Timeline())
        record.client, record.path, record.priority = client, path, "batch"
        held = HeldResponse(record, path, on_lease)
        part = self._core.admission.part(client, requests=requests, wait_s=limit_wait_s)

        async def send(share: Share) -> None:
            async with part:
                request = await _request(path, members, names, share, owner or self._owner(client))
                request.request_id, request.client, request.priority = request_id, client, "batch"
                request.is_from_proxy, request.is_let_in = is_from_proxy, is_let_in
                if queue_timeout_s is not None:
                    request.queue_timeout_s = queue_timeout_s
                record.model, record.kind = request.model, request.kind
                await self._forward.handle(request, held)

        failure = await self._try(send, client, record)
        return refusal(path, failure) if failure else OwnAnswer(held.status, held.body)

    async def _try(
        self, send: Callable[[Share], Awaitable[None]], client: str, record: AccessRecord
    ) -> errors.ProxyError | None:
        """Send a request in flight and log it; return its failure of any kind."""
        core = self._core
        failure: errors.ProxyError | None = None
        try:
            in_flight = InFlightRequest(core.server_state.in_flight, record)
            with in_flight, core.bodies.share(client) as share:
                await send(share)
        except errors.ProxyError as error:
            failure = error
        except asyncio.CancelledError:
            record.status = CLIENT_GONE
            raise
        except Exception:  # noqa: BLE001 (like a client's: a failure is an answer)
            _log.exception("internal error in request %s", record.request_id)
            failure = errors.InternalError()
        finally:
            if failure:
                record.fail(failure)
            record.emit(core.metrics.report, failure)
        return failure

    def _owner(self, client: str) -> CacheOwner:
        is_alone = self._core.settings.share_caches == "key"
        return CacheOwner(client, is_alone) if self._core.keys.are_needed else ANYONE


def refusal(path: str, error: errors.ProxyError) -> OwnAnswer:
    body = orjson.dumps(format_of(path).own_error(error))
    return OwnAnswer(error.status, body, error.retry_after_s, isinstance(error, errors.KeyLimited))


async def _request(
    path: str, members: Mapping[str, Any], names: ModelNames, share: Share, owner: CacheOwner
) -> ProxyRequest:
    """Read a request and raise errors like `read_request`."""
    kind = ENDPOINTS["POST"].get(path)
    if kind is None:
        raise errors.NotFound(f"no instance has an endpoint {errors.quote(path)}")
    plain = {name: value for name, value in members.items() if name not in _STREAM_MEMBERS}
    body = encode_members(plain)
    if len(body) > share.settings.max_body_bytes:
        raise errors.BodyTooLarge(share.settings.max_body_bytes)
    share.add_bytes(len(body))
    await check_complexity(body, share)
    request = await share.run(
        len(body), lambda: json_request(body, kind, None, names, share.settings, owner)
    )
    request.path = path
    request.headers["Content-Type"] = "application/json"
    return request
