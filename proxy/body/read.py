"""Reads a request's body: in time, decompressed, within the limits, and parsed if it is JSON."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from aiohttp import web

from proxy.body.bodies import Share
from proxy.body.count import count_values
from proxy.body.inflate import Inflater
from proxy.errors import BadRequest, BodyTooLarge, RequestTimeout


async def read_body(request: web.BaseRequest, share: Share) -> bytes:
    """The body, decompressed.

    Raises:
        BadRequest: It is malformed.
        BodyExpands: It grows too much when decompressed.
        BodyMemoryFull: All bodies together would take too much memory.
        BodyTooLarge: It has more bytes than the limit.
        RequestTimeout: It did not arrive in time.
        UnknownCoding: Its Content-Encoding is not supported.
    """
    content, limit_s = request.content, share.settings.body_timeout_s
    try:
        if content.is_eof() and "Content-Encoding" not in request.headers:  # nearly always
            body = content.read_nowait()
            _reserve(share, len(body), len(body))
            return body
        if (request.content_length or 0) > share.settings.max_body_bytes:
            raise BodyTooLarge(share.settings.max_body_bytes)
        decoder = _Decoder(request, share)
        async with asyncio.timeout(limit_s):
            async for chunk in content.iter_any():
                await decoder.feed(chunk)
    except TimeoutError as error:
        raise RequestTimeout(
            f"the body did not arrive within {limit_s:g} s; "
            "send it faster, or raise body_timeout_s under [proxy]"
        ) from error
    except web.RequestPayloadError as error:
        raise BadRequest(f"the body cannot be read: {_first_line(error)}") from error
    return decoder.body()


async def check_complexity(body: bytes, share: Share) -> None:
    """Check a JSON body before it is parsed.

    Raises:
        BodyMemoryFull: All bodies together would take too much memory.
        BodyTooComplex: It has too many values, or is nested too deeply.
    """
    most, deepest = share.settings.max_body_values, share.settings.max_body_depth
    share.add_values(await share.run(len(body), lambda: count_values(body, most, deepest)))


def members_of(body: bytes) -> dict[str, Any]:
    """Parse a body that `check_complexity` passed.

    Of a repeated member the last counts. Source: nlohmann's json, as an engine has it, does the
    same (builds 10434 and 11434), so the members checked here are those that it reads.

    Raises:
        BadRequest: It is not a JSON object.
    """
    try:
        members = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(members, dict):
        raise BadRequest("the body must be a JSON object")
    return members


class _Decoder:
    def __init__(self, request: web.BaseRequest, share: Share) -> None:
        coding = ",".join(request.headers.getall("Content-Encoding", ()))
        is_packed = coding.strip().lower() not in {"", "identity"}
        self._inflater = Inflater(coding, share.settings.max_body_ratio) if is_packed else None
        self._share = share
        self._pieces: list[bytes] = []
        self._size_bytes = 0

    async def feed(self, chunk: bytes) -> None:
        if self._inflater is None:
            self._keep(chunk)
            return
        for piece in self._inflater.feed(chunk):
            self._keep(piece)
            await asyncio.sleep(0)  # other requests run between the pieces

    def body(self) -> bytes:
        if self._inflater is not None:
            self._inflater.close()
        return b"".join(self._pieces)

    def _keep(self, piece: bytes) -> None:
        self._size_bytes += len(piece)
        _reserve(self._share, len(piece), self._size_bytes)
        self._pieces.append(piece)


def _reserve(share: Share, count: int, size_bytes: int) -> None:
    if size_bytes > share.settings.max_body_bytes:
        raise BodyTooLarge(share.settings.max_body_bytes)
    share.add_bytes(count)


def _first_line(error: Exception) -> str:
    """The parser's message without the bytes it quotes and its own status."""
    return next((line.strip() for line in str(error).splitlines()[1:] if line.strip()), str(error))
