"""A request's bytes up to an instance, its answer's bytes down to the client, as they come.

Once the answer flows, a chunk costs one read and one write; a client that reads slowly holds up
the instance, not our memory. A client that leaves closes the connection upstream at once, and the
instance is not blamed. An instance that does not begin to answer, or is stopped before it does, is
forgiven once: the request goes to another, or to the same where there is no other. What breaks
later breaks the answer.
"""

from __future__ import annotations

import io
from collections.abc import Collection
from http import HTTPStatus
from typing import Final

import aiohttp

from proxy.answer import Answer
from proxy.dispatch import Dispatch, Lease
from proxy.errors import UpstreamFailed, UpstreamStopped, UpstreamTimeout, UpstreamUnreached
from proxy.headers import for_client
from proxy.record import Tell
from proxy.request import Ask
from proxy.settings import ProxySettings
from proxy.upstream import Upstream, connected

# What aiohttp would say in the client's place where the client said nothing.
_NOT_OURS_TO_SAY: Final = ("Accept", "Content-Type", "User-Agent")


class Forward:
    """Carries requests to instances and their answers back."""

    def __init__(self, dispatch: Dispatch, settings: ProxySettings, tell: Tell) -> None:
        self._dispatch = dispatch
        self._settings = settings
        self._tell = tell

    async def carry(self, ask: Ask, answer: Answer) -> None:
        """Have a request answered, with one more try where the first did not begin.

        Raises:
            ConnectionError: The client left before its answer was complete.
            ProxyError: No instance is admitted, or none answered to the end.
        """
        try:
            await self._attempt(ask, answer)
        except (UpstreamUnreached, UpstreamStopped) as error:
            if answer.has_begun:
                raise
            await self._attempt(ask, answer, avoid=(error.instance,))

    async def _attempt(self, ask: Ask, answer: Answer, avoid: Collection[str] = ()) -> None:
        async with self._dispatch.lease(ask.model, avoid) as lease:
            answer.record.instance = lease.upstream.name
            try:
                await self._exchange(ask, lease, answer)
            except (UpstreamFailed, UpstreamTimeout) as error:
                answer.record.tell_broken(self._tell, error)
                raise

    async def _exchange(self, ask: Ask, lease: Lease, answer: Answer) -> None:
        upstream = lease.upstream
        async with connected(upstream, self._settings) as session:
            response = await _ask(session, ask, upstream)
            try:
                await answer.begin(response.status, for_client(response.headers))
                while chunk := await _next_chunk(response, upstream):
                    lease.hear(chunk)
                    await answer.write(chunk)
                    lease.listen()
                await answer.finish()
            finally:
                response.close()


async def _ask(
    session: aiohttp.ClientSession, ask: Ask, upstream: Upstream
) -> aiohttp.ClientResponse:
    """Send a request; return once the header of its answer is there.

    Raises:
        UpstreamUnreached: It refused the connection, or closed it without a byte.
        UpstreamTimeout: It said nothing for too long.
        UpstreamFailed: It does not speak HTTP, or does not know our key.
    """
    name = upstream.name
    try:
        response = await session.request(
            ask.method,
            upstream.url(ask.path, ask.query),
            headers=_headers(ask, upstream),
            # A file object: aiohttp sends it in pieces, where bytes would go out in one.
            data=io.BytesIO(ask.body) if ask.body else None,
            skip_auto_headers=_NOT_OURS_TO_SAY,
            allow_redirects=False,
        )
    except (aiohttp.ConnectionTimeoutError, aiohttp.ClientConnectorError) as error:
        raise UpstreamUnreached(name, f"takes no connection: {error}") from error
    except aiohttp.SocketTimeoutError as error:
        raise UpstreamTimeout(f"{name} did not begin to answer in time") from error
    except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
        raise UpstreamUnreached(name, "closed the connection without an answer") from error
    except aiohttp.ClientError as error:
        raise UpstreamFailed(f"{name} gave no answer that is HTTP: {error}") from error
    if response.status == HTTPStatus.UNAUTHORIZED:
        # To the client this would say that its own key is wrong.
        raise UpstreamFailed(f"{name} does not know our key; is something else on its port?")
    return response


async def _next_chunk(response: aiohttp.ClientResponse, upstream: Upstream) -> bytes:
    """Return the next bytes of the body, empty at its end.

    Raises:
        UpstreamTimeout: It said nothing for too long.
        UpstreamFailed: It broke off before the end.
    """
    try:
        return await response.content.readany()
    except aiohttp.SocketTimeoutError as error:
        raise UpstreamTimeout(f"{upstream.name} stopped sending its answer") from error
    except aiohttp.ClientError as error:
        raise UpstreamFailed(f"{upstream.name} broke off its answer") from error


def _headers(ask: Ask, upstream: Upstream) -> dict[str, str]:
    own = {"Accept-Encoding": "identity", "X-Request-Id": ask.request_id}
    key = {"Authorization": f"Bearer {upstream.api_key}"} if upstream.api_key else {}
    return {**ask.headers, **own, **key}
