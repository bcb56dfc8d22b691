"""The form of an upload, read while it arrives: the file is never whole in memory.

Source: openai-python sends `purpose` and `expires_after[…]` before the file, other clients also
behind it. RFC 7578 for the form.
"""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import BodyPartReader, MultipartReader, web

from proxy.body.form import MALFORMED, boundary_of, is_form, malformed, plain_filename
from proxy.errors import BadRequest, RequestTimeout
from proxy.jobs.upload import Upload

_PARTS_MAX: Final = 16
_FIELD_MAX_BYTES: Final = 1024
_CHUNK_BYTES: Final = 64 * 1024
_FIELDS: Final = frozenset({"purpose", "expires_after[anchor]", "expires_after[seconds]"})
_TTL_MIN_S: Final = 3600  # as OpenAI's
_TTL_MAX_S: Final = 2_592_000


async def read_upload(request: web.BaseRequest, upload: Upload, timeout_s: float) -> int | None:
    """Read a form and write its file; return for how long to keep that, or None as set.

    Raises:
        BadRequest: It is no such form, or exceeds a limit.
        RequestTimeout: It did not arrive in time.
        StorageFull: There is no space for the file.
        StorageFailed: The database cannot be used.
    """
    reader = _reader(request)
    try:
        async with asyncio.timeout(timeout_s):
            return await _read(reader, upload)
    except TimeoutError as error:
        raise RequestTimeout(
            f"the file did not arrive within {timeout_s:g} s; "
            "send it faster, or raise body_timeout_s under [proxy]"
        ) from error
    except MALFORMED as error:
        raise malformed(error) from error
    except (web.RequestPayloadError, ConnectionError) as error:
        raise BadRequest("the body ended before its form did") from error


def _reader(request: web.BaseRequest) -> MultipartReader:
    content_type = request.headers.get("Content-Type", "")
    if not is_form(content_type):
        raise BadRequest("send the file as multipart/form-data with the fields purpose and file")
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise BadRequest("send the form without a Content-Encoding")
    boundary = boundary_of(content_type)
    headers = {"Content-Type": f'multipart/form-data; boundary="{boundary}"'}
    return MultipartReader(headers, request.content)


async def _read(reader: MultipartReader, upload: Upload) -> int | None:
    fields: dict[str, str] = {}
    has_file = False
    for _ in range(_PARTS_MAX):
        part = await reader.next()
        if part is None:
            break
        if not isinstance(part, BodyPartReader):
            raise BadRequest("a part of the form is itself multipart")
        if part.name == "file" and not has_file:
            has_file = True
            await _read_file(part, upload)
        else:
            fields[_field_name(part)] = await _read_text(part)
    else:
        raise BadRequest(f"the form has more than {_PARTS_MAX} parts")
    if not has_file:
        raise BadRequest("the form has no file")
    if fields.get("purpose") != "batch":
        raise BadRequest('the purpose must be "batch"; no other is supported')
    return _ttl_s(fields)


async def _read_file(part: BodyPartReader, upload: Upload) -> None:
    await upload.begin(plain_filename(part.filename or "batch.jsonl"))
    while not part.at_eof():
        await upload.feed(await part.read_chunk(_CHUNK_BYTES))


def _field_name(part: BodyPartReader) -> str:
    if part.name not in _FIELDS:
        raise BadRequest("the form may have the fields purpose, file and expires_after only")
    return part.name


async def _read_text(part: BodyPartReader) -> str:
    text = b""
    while not part.at_eof():
        text += await part.read_chunk(_CHUNK_BYTES)
        if len(text) > _FIELD_MAX_BYTES:
            raise BadRequest(f"the field {part.name} has more than {_FIELD_MAX_BYTES} bytes")
    return text.decode()


def _ttl_s(fields: dict[str, str]) -> int | None:
    seconds = fields.get("expires_after[seconds]")
    anchor = fields.get("expires_after[anchor]", "created_at")
    if seconds is None and "expires_after[anchor]" not in fields:
        return None
    is_number = seconds is not None and seconds.isascii() and seconds.isdecimal()
    if anchor != "created_at" or not is_number or len(seconds or "") > 9:
        raise BadRequest("expires_after needs the anchor created_at and a number of seconds")
    return checked_ttl_s(int(seconds or ""))


def checked_ttl_s(seconds: int) -> int:
    """Raises BadRequest."""
    if not _TTL_MIN_S <= seconds <= _TTL_MAX_S:
        raise BadRequest(f"expires_after must be {_TTL_MIN_S} to {_TTL_MAX_S} seconds")
    return seconds
