"""Formats of a batch's response: one object, or a line of JSON for each result.

Lines come in the order in which results are complete; the last line has the figures.
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
# Source: realizar 0.8.5, `GenerateResponse`.
_PLAIN: Final = ("token_ids", "text", "num_generated")


class BatchRefused(Exception):
    """The answer to one prompt, an error, is the answer to all."""

    def __init__(self, answer: OwnAnswer) -> None:
        super().__init__(answer.status)
        self.answer = answer


class ResultWriter(Protocol):
    """The methods raise ConnectionError if the client has left."""

    async def begin(self) -> None:
        """The batch is accepted."""

    async def add(self, result: BatchResult, answer: OwnAnswer, /) -> None:
        """Take the result of a prompt, made of this answer; may raise BatchRefused."""

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
        self._keep(result.index, result.json())
        if result.error:
            self._failed[result.index] = answer

    def _keep(self, index: int, written: bytes) -> None:
        self._results[index] = written
        self._size_bytes += len(written)
        if self._size_bytes > GATHERED_MAX_BYTES:
            raise UpstreamFailed(
                f"the results are larger than {GATHERED_MAX_BYTES} bytes; "
                f"send fewer prompts at once, or to /v1/batch/completions with Accept: {LINES}"
            )

    def _joined(self) -> bytes:
        return b",".join(self._results[index] for index in sorted(self._results))

    async def finish(self, stats: BatchStats) -> None:
        if len(self._failed) == len(self._results):
            await write_whole(self._response, self._failed[0])
            return
        body = b'{"results":[%b],"stats":%b}' % (self._joined(), orjson.dumps(asdict(stats)))
        await write_whole(self._response, OwnAnswer(200, body))


class PlainWriter(WholeWriter):
    """Results without figures, each with `token_ids`, `text` and `num_generated`."""

    async def add(self, result: BatchResult, answer: OwnAnswer) -> None:
        if result.error:
            raise BatchRefused(answer)
        members = {name: getattr(result, name) for name in _PLAIN}
        self._keep(result.index, orjson.dumps(members))

    async def finish(self, _stats: BatchStats) -> None:
        await write_whole(self._response, OwnAnswer(200, b'{"results":[%b]}' % self._joined()))


def writer_for(accept: str, response: ClientResponse) -> ResultWriter:
    return LinesWriter(response) if LINES in accept.lower() else WholeWriter(response)


async def write_whole(response: ClientResponse, answer: OwnAnswer) -> None:
    """Send an answer of our own; raises ConnectionError if the client has left."""
    headers = CIMultiDict({"Content-Type": JSON, "Content-Length": str(len(answer.body))})
    if answer.status < 400:
        await response.begin(answer.status, headers)
        await response.finish(answer.body)
        return
    if answer.retry_after_s is not None:
        headers["Retry-After"] = str(answer.retry_after_s)
    await response.refuse(answer.status, headers, answer.body)
