"""The bytes of a request's body: in time, decompressed, and never past the limits."""

from __future__ import annotations

import asyncio

from aiohttp import web

from proxy.body.bodies import Share
from proxy.body.inflate import Inflater
from proxy.errors import BadRequest, BodyTooLarge, RequestTimeout


async def read_body(request: web.BaseRequest, share: Share) -> bytes:
    """Return the body of a request, within the limits.

    Args:
        request: Its body not yet read, and as it was sent: the server decompresses nothing.
        share: The limits, and the memory that it may take.

    Raises:
        BadRequest: It is broken.
        BodyExpands: It becomes too many times larger when decompressed.
        BodyMemoryFull: All bodies together would take too much.
        BodyTooLarge: It has more bytes than the limit.
        RequestTimeout: It did not come in time.
        UnknownCoding: It is compressed in a way that is not known here.
    """
    max_bytes, limit_s = share.settings.max_body_bytes, share.settings.body_timeout_s
    if (request.content_length or 0) > max_bytes:
        raise BodyTooLarge(max_bytes)
    gathered = _Gathered(request, share)
    try:
        if request.content.is_eof():  # all of it came with the header, as mostly
            await gathered.add(request.content.read_nowait())
        else:
            async with asyncio.timeout(limit_s):
                async for chunk in request.content.iter_any():
                    await gathered.add(chunk)
    except TimeoutError as error:
        raise RequestTimeout(
            f"the body did not come within {limit_s:g} s; "
            "send it faster, or raise body_timeout_s under [proxy]"
        ) from error
    except web.RequestPayloadError as error:
        raise BadRequest(f"the body cannot be read: {_first_line(error)}") from error
    return gathered.whole()


class _Gathered:
    """What has come of a body, as it will be read."""

    def __init__(self, request: web.BaseRequest, share: Share) -> None:
        coding = ",".join(request.headers.getall("Content-Encoding", ()))
        is_packed = coding.strip().lower() not in {"", "identity"}
        self._inflater = Inflater(coding, share.settings.max_body_ratio) if is_packed else None
        self._max_bytes = share.settings.max_body_bytes
        self._share = share
        self._pieces: list[bytes] = []
        self._size_bytes = 0

    async def add(self, chunk: bytes) -> None:
        """Take the next bytes; between the pieces that they become, others have their turn."""
        if self._inflater is None:
            self._keep(chunk)
            return
        for piece in self._inflater.feed(chunk):
            self._keep(piece)
            await asyncio.sleep(0)

    def whole(self) -> bytes:
        if self._inflater is not None:
            self._inflater.close()
        if len(self._pieces) == 1:
            return self._pieces[0]
        return b"".join(self._pieces)

    def _keep(self, piece: bytes) -> None:
        self._size_bytes += len(piece)
        if self._size_bytes > self._max_bytes:
            raise BodyTooLarge(self._max_bytes)
        self._share.add_bytes(len(piece))
        self._pieces.append(piece)


def _first_line(error: Exception) -> str:
    """Return what a parser says without the bytes it shows; the status is ours to say."""
    return next((line.strip() for line in str(error).splitlines()[1:] if line.strip()), str(error))
