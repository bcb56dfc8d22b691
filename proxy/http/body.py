"""Reads a request's body: in time, decompressed, within the limits, and parsed if it is JSON.

`Bodies` limits the memory of all bodies together, and has one thread that parses large ones. The
values of JSON are counted in pieces before it is parsed: in linear time, and without holding the
interpreter for more than a few milliseconds. Invalid JSON gets an arbitrary count, and the parser
rejects it. Compressed bodies are inflated in small pieces, up to a ratio.

Source: RFC 9110 section 8.4 for the codings, RFC 1952 for gzip; `deflate` is a zlib stream (RFC
1950), which some clients send without its header.
"""

from __future__ import annotations

import asyncio
import zlib
from array import array
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, Final, Self, TypeVar

import orjson
from aiohttp import web

from proxy.common.background_tasks import worker_threads
from proxy.errors import (
    BadRequest,
    BodyExpands,
    BodyMemoryFull,
    BodyTooComplex,
    BodyTooLarge,
    RequestTimeout,
    UnknownCoding,
    quote,
)
from proxy.settings import ProxySettings

# Memory and time of a list or an object, and of a member's name, relative to a number.
_CONTAINER_VALUES: Final = 8
_NAME_VALUES: Final = 2
_STEPS: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_NOT_STRUCTURAL: Final = bytes(byte for byte in range(256) if byte not in b'",:[]{}')


def count_values(
    body: bytes, max_values: int, max_depth: int, *, piece_bytes: int = 64 * 1024
) -> int:
    """Return the number of values; for one piece, maybe a larger number within the limit.

    A number, a string or a literal counts 1, a member's name 2, a list or an object 8 plus its
    content. Raises BodyTooComplex above a limit.
    """
    # A count that includes the inside of strings spares most small texts the exact scan.
    if len(body) <= piece_bytes and (openings := body.count(b"[") + body.count(b"{")) <= max_depth:
        most = _values(body, openings)
        if most < max_values:
            return most + 1
    return _count_outside_strings(body, max_values, max_depth, piece_bytes)


def _count_outside_strings(body: bytes, max_values: int, max_depth: int, piece_bytes: int) -> int:
    values, depth = 1, 0
    for text in _outside_strings(body, piece_bytes):
        steps = array("b", text.translate(_STEPS, b",:"))
        deepest = max(accumulate(steps, initial=depth))
        depth += sum(steps)
        values += _values(text, steps.count(1))
        if deepest > max_depth:
            reason = f"it has more than {max_depth} levels"
            raise BodyTooComplex(reason, "max_body_depth")
        if values > max_values:
            raise BodyTooComplex(f"it has more than {max_values} values", "max_body_values")
    return values


def _values(text: bytes, openings: int) -> int:
    return text.count(b",") + _NAME_VALUES * text.count(b":") + _CONTAINER_VALUES * openings


def _outside_strings(body: bytes, piece_bytes: int) -> Iterator[bytes]:
    """Yield the characters `,:[]{}` outside of strings, piece by piece."""
    is_inside, held = False, b""
    for start in range(0, len(body), piece_bytes):
        text, held = _drop_escapes(held + body[start : start + piece_bytes])
        # Structural characters and quotes are a small part of most texts.
        parts = text.translate(None, _NOT_STRUCTURAL).split(b'"')
        yield b"".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0


def _drop_escapes(text: bytes) -> tuple[bytes, bytes]:
    """Return a piece without escaped quotes, and a backslash that escapes into the next piece."""
    if text.find(b"\\") < 0:  # `in` would first raise and drop a TypeError
        return text, b""
    is_open = (len(text) - len(text.rstrip(b"\\"))) % 2
    held = text[-1:] if is_open else b""
    text = text[: len(text) - is_open]
    return text.replace(b"\\\\", b"").replace(b'\\"', b""), held


# Copies of a body: its bytes, the decoded text, the bytes sent upstream, their buffer.
_COPIES: Final = 5
# Memory of a short string in a list; a list or an object counts as several values.
_VALUE_BYTES: Final = 64
# Parsing a smaller body takes less than 20 ms of the event loop, with any content.
LARGE_BYTES: Final = 128 * 1024
# Parsing holds the GIL, so a second thread would only keep the event loop waiting longer.
_THREADS: Final = 1

_Result = TypeVar("_Result")


class Bodies:
    """Limits the memory of all bodies.

    The bodies of one client may take half of `body_memory_bytes`, so a client that sends many, or
    sends slowly, leaves room for others. A body may exceed either limit while it is the only one,
    of its client or of all clients: its own limits bound it.
    """

    def __init__(self, settings: ProxySettings) -> None:
        self.settings = settings
        self.held_bytes = 0  # Estimated memory of all bodies.
        self.threads = worker_threads(_THREADS, "body")
        self.by_client: dict[str, int] = {}  # The same for each client.

    def share(self, client: str) -> Share:
        """Return the share of one body; `client` is a key's name or an address."""
        return Share(self, client)

    def close(self) -> None:
        """End the thread, and cancel the work that waits for it."""
        self.threads.shutdown(wait=False, cancel_futures=True)


class Share:
    """The memory reserved for one body, by estimate; the context manager frees it."""

    def __init__(self, bodies: Bodies, client: str) -> None:
        self.settings = bodies.settings
        self.client = client
        self.held_bytes = 0
        self._bodies = bodies

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bodies.held_bytes -= self.held_bytes
        by_client = self._bodies.by_client
        left = by_client.get(self.client, 0) - self.held_bytes
        if left:
            by_client[self.client] = left
        else:
            by_client.pop(self.client, None)

    def add_bytes(self, count: int, values: int = 0) -> None:
        """Reserve memory for bytes of the body, and for the values in it.

        Raises BodyMemoryFull if all bodies, or the client's bodies, would exceed the limit.
        """
        size_bytes = count * _COPIES + values * _VALUE_BYTES
        bodies, limit_bytes = self._bodies, self.settings.body_memory_bytes
        held, of_client = bodies.held_bytes, bodies.by_client.get(self.client, 0)
        if held + size_bytes > limit_bytes // 2:  # then one of the limits may be exceeded
            if held + size_bytes > limit_bytes and held != self.held_bytes:
                raise _memory_full_error("all requests", limit_bytes)
            if of_client + size_bytes > limit_bytes // 2 and of_client != self.held_bytes:
                raise _memory_full_error("one client's requests", limit_bytes // 2)
        bodies.held_bytes = held + size_bytes
        bodies.by_client[self.client] = of_client + size_bytes
        self.held_bytes += size_bytes

    async def run(self, size_bytes: int, work: Callable[[], _Result]) -> _Result:
        """Run `work` on a body, in the thread if the body is large.

        So `work` must not touch the event loop's state.
        """
        if size_bytes <= LARGE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._bodies.threads, work)


def _memory_full_error(whose: str, limit_bytes: int) -> BodyMemoryFull:
    return BodyMemoryFull(
        f"the bodies of {whose} use all of their {limit_bytes} bytes of memory; "
        "retry later, or raise body_memory_bytes under [proxy]"
    )


_INFLATED_BYTES: Final = 128 * 1024
# Exempt from the ratio, which means little for a small body.
_FREE_BYTES: Final = 1024**2
_GZIP_BITS: Final = 16 + zlib.MAX_WBITS
_WINDOWS: Final = {"gzip": _GZIP_BITS, "x-gzip": _GZIP_BITS, "deflate": zlib.MAX_WBITS}


class Inflater:
    """Decompresses one body; the first MiB is exempt from `max_ratio`. Raises UnknownCoding."""

    def __init__(self, coding: str, max_ratio: float) -> None:
        self._coding = coding.strip().lower()
        if self._coding not in _WINDOWS:
            raise UnknownCoding(
                f"Content-Encoding {quote(coding)} is not supported; use gzip, deflate or none"
            )
        self._max_ratio = max_ratio
        self._stream = zlib.decompressobj(_WINDOWS[self._coding])
        self._taken_bytes = 0
        self._given_bytes = 0

    def feed(self, packed: bytes) -> Iterator[bytes]:
        """Yield decompressed pieces of at most 128 KiB. Raises BadRequest, BodyExpands."""
        is_raw = self._coding == "deflate" and packed and packed[0] & 0x0F != zlib.DEFLATED
        if is_raw and not self._taken_bytes:
            self._stream = zlib.decompressobj(-zlib.MAX_WBITS)
        self._taken_bytes += len(packed)
        while packed:
            try:
                piece = self._stream.decompress(packed, _INFLATED_BYTES)
            except zlib.error as error:
                raise BadRequest(f"the body is not {self._coding} data: {error}") from error
            if self._stream.unused_data:
                raise BadRequest("the body has bytes after the end of its compressed data")
            self._count(len(piece))
            yield piece
            packed = self._stream.unconsumed_tail

    def close(self) -> None:
        """End the body. Raises BadRequest if the compressed data is incomplete."""
        if not self._stream.eof and self._taken_bytes:
            raise BadRequest(f"the body ends in the middle of its {self._coding} data")

    def _count(self, size_bytes: int) -> None:
        self._given_bytes += size_bytes
        limit_bytes = max(_FREE_BYTES, self._max_ratio * self._taken_bytes)
        if self._given_bytes > limit_bytes:
            raise BodyExpands(
                f"the decompressed body is more than {self._max_ratio:g} times larger; "
                "send it uncompressed, or raise max_body_ratio under [proxy]"
            )


async def read_body(request: web.BaseRequest, share: Share) -> bytes:
    """Return the decompressed body.

    Raises BadRequest if it is malformed, BodyExpands, BodyMemoryFull, BodyTooLarge, RequestTimeout
    or UnknownCoding.
    """
    content, limit_s = request.content, share.settings.body_timeout_s
    try:
        if content.is_eof() and "Content-Encoding" not in request.headers:  # nearly always
            body = content.read_nowait()
            if len(body) > share.settings.max_body_bytes:
                raise BodyTooLarge(share.settings.max_body_bytes)
            share.add_bytes(len(body))
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
        # The first line is the parser's own status; later ones quote bytes.
        lines = (line.strip() for line in str(error).splitlines()[1:])
        reason = next(filter(None, lines), str(error))
        raise BadRequest(f"the body cannot be read: {reason}") from error
    return decoder.body()


async def check_complexity(body: bytes, share: Share) -> None:
    """Check a JSON body before it is parsed. Raises BodyMemoryFull, BodyTooComplex."""
    if len(body) <= LARGE_BYTES:
        check_small(body, share)
        return
    most, deepest = share.settings.max_body_values, share.settings.max_body_depth
    values = await share.run(len(body), lambda: count_values(body, most, deepest))
    share.add_bytes(0, values)


def check_small(body: bytes, share: Share) -> None:
    """Check a body of at most `LARGE_BYTES`, as `check_complexity` does."""
    limits = share.settings
    share.add_bytes(0, count_values(body, limits.max_body_values, limits.max_body_depth))


def members_of(body: bytes) -> dict[str, Any]:
    """Parse a body that `check_complexity` accepted.

    Of a repeated member the last counts. Engines do the same, so they read the members that are
    checked here. Source: nlohmann's json in builds 10434 and 11434. Raises BadRequest.
    """
    try:
        members = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(members, dict):
        raise BadRequest("the body must be a JSON object")
    return members


async def read_members(
    request: web.BaseRequest, share: Share, *, may_be_empty: bool = False
) -> dict[str, Any]:
    """Return a body's JSON object; raises as `read_body`, `check_complexity` and `members_of`."""
    body = await read_body(request, share)
    if may_be_empty and not body:
        return {}
    await check_complexity(body, share)
    return await share.run(len(body), lambda: members_of(body))


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
        if self._size_bytes > self._share.settings.max_body_bytes:
            raise BodyTooLarge(self._share.settings.max_body_bytes)
        self._share.add_bytes(len(piece))
        self._pieces.append(piece)
