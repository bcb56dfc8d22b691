"""Decompresses bodies in small pieces, up to a ratio.

Source: RFC 9110 section 8.4 for the codings, RFC 1952 for gzip; `deflate` is a zlib stream (RFC
1950), which some clients send without its header.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final

from proxy.errors import BadRequest, BodyExpands, UnknownCoding, quoted

_PIECE_BYTES: Final = 128 * 1024
# Exempt from the ratio, which says little about a small body.
_FREE_BYTES: Final = 1024**2
_GZIP_BITS: Final = 16 + zlib.MAX_WBITS
_WINDOWS: Final = {"gzip": _GZIP_BITS, "x-gzip": _GZIP_BITS, "deflate": zlib.MAX_WBITS}


class Inflater:
    """Decompresses one body; the first MiB is exempt from `max_ratio`. Raises UnknownCoding."""

    def __init__(self, coding: str, max_ratio: float) -> None:
        self._coding = coding.strip().lower()
        if self._coding not in _WINDOWS:
            raise UnknownCoding(
                f"Content-Encoding {quoted(coding)} is not supported; use gzip, deflate or none"
            )
        self._max_ratio = max_ratio
        self._stream = zlib.decompressobj(_WINDOWS[self._coding])
        self._taken_bytes = 0
        self._given_bytes = 0

    def feed(self, packed: bytes) -> Iterator[bytes]:
        """Yield decompressed pieces of at most 128 KiB. Raises BadRequest, BodyExpands."""
        if not self._taken_bytes and packed:
            self._detect_raw(packed)
        self._taken_bytes += len(packed)
        while packed:
            piece = self._unpacked(packed)
            if self._stream.unused_data:
                raise BadRequest("the body has bytes after the end of its compressed data")
            self._count(len(piece))
            yield piece
            packed = self._stream.unconsumed_tail

    def close(self) -> None:
        """The body has ended. Raises BadRequest if the stream is incomplete."""
        if not self._stream.eof and self._taken_bytes:
            raise BadRequest(f"the body ends in the middle of its {self._coding} data")

    def _detect_raw(self, packed: bytes) -> None:
        if self._coding == "deflate" and packed[0] & 0x0F != zlib.DEFLATED:
            self._stream = zlib.decompressobj(-zlib.MAX_WBITS)

    def _unpacked(self, packed: bytes) -> bytes:
        try:
            return self._stream.decompress(packed, _PIECE_BYTES)
        except zlib.error as error:
            raise BadRequest(f"the body is not {self._coding} data: {error}") from error

    def _count(self, size_bytes: int) -> None:
        self._given_bytes += size_bytes
        limit_bytes = max(_FREE_BYTES, self._max_ratio * self._taken_bytes)
        if self._given_bytes > limit_bytes:
            raise BodyExpands(
                f"the decompressed body is more than {self._max_ratio:g} times larger; "
                "send it uncompressed, or raise max_body_ratio under [proxy]"
            )
