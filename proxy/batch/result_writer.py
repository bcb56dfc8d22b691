"""How the results of a batch reach the client: as one object, or each as a line of its own.

Lines: JSON objects, one a line, in the order in which they are complete; the last has the figures.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Final, Protocol

import orjson
from multidict import CIMultiDict

from proxy.batch.requests import OwnAnswer
from proxy.batch.results import BatchResult, BatchStats
from proxy.errors import UpstreamFailed
from proxy.forward.client_response import ClientResponse
from proxy.forward.gather import GATHERED_MAX_BYTES
from proxy.headers import JSON

LINES: Final = "application/x-ndjson"


class ResultWriter(Protocol):
    """The methods raise ConnectionError where the client has left."""

    async def begin(self) -> None:
        """The batch is accepted."""

    async def add(self, result: BatchResult, answer: OwnAnswer, /) -> None:
        """Take the result of a prompt, made of this answer."""

    async def finish(self, stats: BatchStats, /) -> None:
        """All are there."""


class LinesWriter:
    def __init__(self, response: ClientResponse) -> None:
        self._response = response
        self._turn = asyncio.Lock()

    async def begin(self) -> None:
        await self._response.begin(200, CIMultiDict({"Content-Type": LINES}))

    async def add(self, result: BatchResult, _answer: OwnAnswer) -> None:
        async with self._turn:
            await self._response.write(result.json() + b"\n")

    async def finish(self, stats: BatchStats) -> None:
        await self._response.finish(orjson.dumps({"stats": asdict(stats)}) + b"\n")


class WholeWriter:
    """Holds the results; where each prompt failed, the first one's error is the answer."""

    def __init__(self, response: ClientResponse) -> None:
        self._response = response
        self._results: dict[int, bytes] = {}
        self._size_bytes = 0
        self._failed: dict[int, OwnAnswer] = {}

    async def begin(self) -> None:
        """Nothing is sent before the end."""

    async def add(self, result: BatchResult, answer: OwnAnswer) -> None:
        self._results[result.index] = written = result.json()
        self._size_bytes += len(written)
        if self._size_bytes > GATHERED_MAX_BYTES:
            raise UpstreamFailed(
                f"the results are larger than {GATHERED_MAX_BYTES} bytes; "
                f"send fewer prompts at once, or Accept: {LINES}"
            )
        if result.error:
            self._failed[result.index] = answer

    async def finish(self, stats: BatchStats) -> None:
        if len(self._failed) == len(self._results):
            await self._refuse(self._failed[0])
            return
        results = b",".join(self._results[index] for index in sorted(self._results))
        body = b'{"results":[%b],"stats":%b}' % (results, orjson.dumps(asdict(stats)))
        await self._response.begin(200, _headers(body))
        await self._response.finish(body)

    async def _refuse(self, answer: OwnAnswer) -> None:
        headers = _headers(answer.body)
        if answer.retry_after_s is not None:
            headers["Retry-After"] = str(answer.retry_after_s)
        await self._response.refuse(answer.status, headers, answer.body)


def writer_for(accept: str, response: ClientResponse) -> ResultWriter:
    return LinesWriter(response) if LINES in accept.lower() else WholeWriter(response)


def _headers(body: bytes) -> CIMultiDict[str]:
    return CIMultiDict({"Content-Type": JSON, "Content-Length": str(len(body))})
