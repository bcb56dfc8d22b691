"""Parses multipart forms part by part within limits, and serialises them again.

An instance never gets the client's own bytes, because parsers disagree on unusual forms: each part
is written again with its name and, for files, file name and type.

Source: RFC 7578; RFC 2046 section 5.1.1 for the boundary. An engine treats a part with a file name
as a file and any other as text (build 10434).
"""

from __future__ import annotations

import asyncio
import os
import re
import warnings
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import Final

from aiohttp import BodyPartReader, MultipartReader, StreamReader, hdrs, http_exceptions
from aiohttp.base_protocol import BaseProtocol
from aiohttp.multipart import BadContentDispositionHeader, BadContentDispositionParam

from proxy.errors import BadRequest

_TYPE: Final = "multipart/form-data"
_PARTS_MAX: Final = 64
_HEADERS_MAX: Final = 8
_LINE_MAX_BYTES: Final = 2048
_NAME_MAX_CHARACTERS: Final = 128
_TEXT_MAX_BYTES: Final = 64 * 1024
_CHUNK_BYTES: Final = 64 * 1024
# Number of chunks that are read before other tasks run; takes a few milliseconds.
_CHUNKS_AT_ONCE: Final = 16
_BOUNDARY: Final = re.compile(r"[0-9A-Za-z'()+_,./:=? -]{0,69}[0-9A-Za-z'()+_,./:=?-]")
_UNSAFE: Final = re.compile(r'[\x00-\x1f\x7f"\\\ud800-\udfff]')
_MEDIA_TYPE: Final = re.compile(r"[A-Za-z0-9!#$&^_.+-]{1,64}/[A-Za-z0-9!#$&^_.+-]{1,64}")
_PLAIN: Final = frozenset({"7bit", "8bit", "binary"})
# A client that names a slot in use would corrupt another client's text.
_DROPPED: Final = frozenset({"id_slot"})

# Raised as errors, because Python keeps each distinct warning forever.
for _category in (BadContentDispositionHeader, BadContentDispositionParam):
    warnings.filterwarnings("error", category=_category)


@dataclass(frozen=True, slots=True)
class Part:
    """One part: a file, or text (UTF-8) without a file name."""

    name: str
    content: bytes = field(repr=False)
    filename: str = ""
    media_type: str = ""


@dataclass(frozen=True, slots=True)
class Form:
    """A form; only fields whose names end in [] occur more than once."""

    parts: tuple[Part, ...]
    boundary: str = field(default_factory=lambda: os.urandom(16).hex())

    @property
    def content_type(self) -> str:
        return f"{_TYPE}; boundary={self.boundary}"

    def texts(self) -> dict[str, str]:
        """Return the text fields; of a repeated field the last."""
        return {part.name: part.content.decode() for part in self.parts if not part.filename}

    def with_model(self, name: str) -> Form:
        content = name.encode()
        parts = (
            replace(part, content=content) if part.name == "model" and not part.filename else part
            for part in self.parts
        )
        return replace(self, parts=tuple(parts))

    def without(self, name: str) -> Form:
        kept = tuple(part for part in self.parts if part.filename or part.name != name)
        return replace(self, parts=kept)

    def encode(self) -> bytes:
        pieces = [
            f"--{self.boundary}\r\n{_head(part)}\r\n\r\n".encode() + part.content + b"\r\n"
            for part in self.parts
        ]
        return b"".join((*pieces, f"--{self.boundary}--\r\n".encode()))


def is_form(content_type: str) -> bool:
    return content_type.partition(";")[0].strip().lower() == _TYPE


async def read_form(content_type: str, body: bytes) -> Form:
    """Parse a body. Raises BadRequest if it is malformed or exceeds a limit."""
    try:
        reader = await _reader(content_type, body)
        parts = [part async for part in _parts(reader)]
    except MALFORMED as error:
        raise form_error(error) from error
    seen: set[str] = set()
    for name in (part.name for part in parts):
        if name in seen and not name.endswith("[]"):
            raise BadRequest(f"the form has more than one field {name}")
        seen.add(name)
    return Form(tuple(part for part in parts if part.name not in _DROPPED))


# The errors that aiohttp's reader raises.
MALFORMED: Final = (
    ValueError,  # of boundaries, encodings and ends
    RuntimeError,
    AssertionError,
    RuntimeWarning,
    http_exceptions.HttpProcessingError,
)


def form_error(error: Exception) -> BadRequest:
    message = error.message if isinstance(error, http_exceptions.HttpProcessingError) else error
    reason = ascii(str(message).partition("\n")[0][:120])[1:-1]
    return BadRequest(f"the form cannot be read: {reason or type(error).__name__}")


def plain_filename(filename: str) -> str:
    """Return a file's name of at most 128 characters, without special characters."""
    return _UNSAFE.sub("_", filename)[:_NAME_MAX_CHARACTERS] or "file"


class _Stream(StreamReader):
    """Limits the length of lines: joining a long line takes quadratic time."""

    async def readuntil(self, separator: bytes = b"\n", *, max_size: int | None = None) -> bytes:
        return await super().readuntil(separator, max_size=max_size or _LINE_MAX_BYTES)


async def _reader(content_type: str, body: bytes) -> MultipartReader:
    boundary = boundary_of(content_type)
    # aiohttp reads a preamble of any length line by line.
    if not body.startswith(f"--{boundary}\r\n".encode()):
        raise BadRequest("the form does not begin with the boundary of its Content-Type")
    stream = _Stream(BaseProtocol(asyncio.get_running_loop()), len(body) + 1)
    # Small pieces, because the reader copies the rest of a piece when it looks ahead.
    for start in range(0, len(body), _CHUNK_BYTES):
        stream.feed_data(body[start : start + _CHUNK_BYTES])
        if start % (_CHUNK_BYTES * _CHUNKS_AT_ONCE) == 0:
            await asyncio.sleep(0)
    stream.feed_eof()
    headers = {str(hdrs.CONTENT_TYPE): f'{_TYPE}; boundary="{boundary}"'}
    return MultipartReader(
        headers, stream, max_field_size=_LINE_MAX_BYTES, max_headers=_HEADERS_MAX
    )


def boundary_of(content_type: str) -> str:
    """Return the boundary of a form; raises BadRequest."""
    boundaries = [
        value.strip()
        for name, is_given, value in (
            parameter.partition("=") for parameter in content_type.split(";")[1:]
        )
        if is_given and name.strip().lower() == "boundary"
    ]
    boundary = boundaries[0].removeprefix('"').removesuffix('"') if len(boundaries) == 1 else ""
    if not _BOUNDARY.fullmatch(boundary):
        raise BadRequest("the Content-Type of the form has no boundary of 1 to 70 characters")
    return boundary


async def _parts(reader: MultipartReader) -> AsyncIterator[Part]:
    count = 0
    while (part := await reader.next()) is not None:
        count += 1
        if count > _PARTS_MAX:
            raise BadRequest(f"the form has more than {_PARTS_MAX} parts")
        if not isinstance(part, BodyPartReader):
            raise BadRequest("a part of the form is itself multipart")
        yield await _read(part)


async def _read(part: BodyPartReader) -> Part:
    name, filename = part.name, part.filename
    if not name or len(name) > _NAME_MAX_CHARACTERS or _UNSAFE.search(name):
        raise BadRequest(
            "a part of the form has no name, or its name is too long or has special characters"
        )
    encoding = part.headers.get(hdrs.CONTENT_TRANSFER_ENCODING, "binary").strip().lower()
    if encoding not in _PLAIN:
        raise BadRequest(f"the field {name} of the form is encoded; send it unencoded")
    if filename is None:
        return Part(name, await _text(part, name))
    media_type = part.headers.get(hdrs.CONTENT_TYPE, "").partition(";")[0].strip()
    content = b"".join([chunk async for chunk in _chunks(part)])
    plain = plain_filename(filename)
    return Part(name, content, plain, media_type if _MEDIA_TYPE.fullmatch(media_type) else "")


async def _text(part: BodyPartReader, name: str) -> bytes:
    text = b""
    async for chunk in _chunks(part):
        text += chunk
        if len(text) > _TEXT_MAX_BYTES:
            raise BadRequest(f"the field {name} of the form has more than {_TEXT_MAX_BYTES} bytes")
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise BadRequest(f"the field {name} of the form is not UTF-8") from error
    return text


async def _chunks(part: BodyPartReader) -> AsyncIterator[bytes]:
    count = 0
    while not part.at_eof():
        yield await part.read_chunk(_CHUNK_BYTES)
        count += 1
        if count % _CHUNKS_AT_ONCE == 0:
            await asyncio.sleep(0)


def _head(part: Part) -> str:
    head = f'Content-Disposition: form-data; name="{part.name}"'
    if not part.filename:
        return head
    head += f'; filename="{part.filename}"'
    return f"{head}\r\nContent-Type: {part.media_type or 'application/octet-stream'}"
