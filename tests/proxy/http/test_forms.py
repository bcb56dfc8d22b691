"""Forms: their fields, refused forms, and how a form is written again."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

import aiohttp
import pytest
from aiohttp import StreamReader
from aiohttp.base_protocol import BaseProtocol
from support.growth import is_linear

from proxy.errors import BadRequest
from proxy.http.forms import Form, Part, is_form, read_form

TYPE = "multipart/form-data; boundary=x"


def field(name: str, content: bytes, more: str = "", *lines: str) -> bytes:
    head = "\r\n".join([f'Content-Disposition: form-data; name="{name}"{more}', *lines])
    return b"--x\r\n" + head.encode() + b"\r\n\r\n" + content + b"\r\n"


def form(*fields: bytes) -> bytes:
    return b"".join(fields) + b"--x--\r\n"


SOUND = field("file", b"\xff\x00\r\n--xsound", '; filename="a;b.wav"', "Content-Type: audio/wav")
MODEL = field("model", b"vendor/chat")


async def test_the_fields_are_found_among_bytes_that_are_no_text() -> None:
    read = await read_form(TYPE, form(field("file", b"\xff\r\n--", '; filename="a"'), MODEL))
    assert read.parts == (
        Part("file", b"\xff\r\n--", "a", ""),
        Part("model", b"vendor/chat"),
    )
    assert read.texts() == {"model": "vendor/chat"}


async def test_another_name_takes_the_models_place_and_the_rest_stays() -> None:
    read = await read_form(TYPE, form(field("a", b"1"), MODEL))
    assert read.with_model("other").texts() == {"a": "1", "model": "other"}
    without = await read_form(TYPE, form(field("a", b"1")))
    assert without.with_model("other").texts() == {"a": "1"}


async def test_what_is_written_is_read_as_the_same_by_others_too() -> None:
    parts = (Part("model", "vendor/é".encode()), Part("file", b"\xff\r\n--x\r\n", "ä.wav", "a/b"))
    written = Form(parts)
    assert (await read_form(written.content_type, written.encode())).parts == parts
    stream = StreamReader(BaseProtocol(asyncio.get_running_loop()), 2**16)
    stream.feed_data(written.encode())
    stream.feed_eof()
    reader = aiohttp.MultipartReader({"Content-Type": written.content_type}, stream)
    names = [part.name async for part in reader if isinstance(part, aiohttp.BodyPartReader)]
    assert names == ["model", "file"]


async def test_a_client_names_no_slot_by_a_form_and_no_file_passes_for_a_text() -> None:
    read = await read_form(TYPE, form(field("id_slot", b"0"), field("m", b"1", '; filename=""')))
    assert read.parts == (Part("m", b"1", "file", ""),)


@pytest.mark.parametrize(
    ("content_type", "is_one"),
    [
        ("multipart/form-data; boundary=x", True),
        ("Multipart/Form-Data;boundary=x", True),
        ("multipart/mixed; boundary=x", False),
        ("multipart/form-data-x; boundary=x", False),
        ("application/json; a=multipart/form-data", False),
        ("", False),
    ],
)
def test_only_one_type_is_that_of_a_form(content_type: str, *, is_one: bool) -> None:
    assert is_form(content_type) is is_one


MALFORMED = {
    "empty": b"",
    "no parts": b"--x--\r\n",
    "another boundary": form(MODEL).replace(b"--x", b"--y"),
    "cut short": form(MODEL)[:-8],
    "no end": MODEL,
    "text before it": b"hello\r\n" + form(MODEL),
    "no name": form(b"--x\r\nContent-Disposition: form-data\r\n\r\n1\r\n"),
    "no header": form(b"--x\r\n\r\n1\r\n"),
    "a broken name": form(b'--x\r\nContent-Disposition: form-data; name="a\r\n\r\n1\r\n'),
    "a name with a quote": form(field('a\\"b', b"1")),
    "a long name": form(field("a" * 129, b"1")),
    "two models": form(MODEL, MODEL),
    "not UTF-8": form(field("prompt", b"\xff")),
    "a long text": form(field("prompt", b"a" * 65_537)),
    "65 parts": form(*(field(f"a{index}", b"") for index in range(65))),
    "9 header fields": form(field("a", b"", "", *[f"X-{index}: 1" for index in range(9)])),
    "a long header field": form(field("a", b"", "", "X: " + "a" * 2100)),
    "a form in a form": form(field("a", b"", "", "Content-Type: multipart/mixed; boundary=y")),
    "encoded": form(field("a", b"QQ==", "", "Content-Transfer-Encoding: base64")),
    "a charset of its own": form(field("_charset_", b"a" * 40), MODEL),
    "a line that does not end": form(MODEL) + b"a" * 100_000,
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=list(MALFORMED))
async def test_a_form_that_is_not_plain_is_a_bad_request(body: bytes) -> None:
    with pytest.raises(BadRequest):
        await read_form(TYPE, body)


@pytest.mark.parametrize(
    "said",
    ["", "; boundary=", "; boundary=" + "a" * 71, '; boundary="a\tb"', "; boundary=a;boundary=b"],
)
async def test_a_boundary_must_be_there_once_and_plain(said: str) -> None:
    with pytest.raises(BadRequest, match="boundary"):
        await read_form("multipart/form-data" + said, form(MODEL))


LINE = b'Content-Disposition: form-data; name="model"\r\n'
HOSTILE = {
    "one header field again and again": lambda pump: b"--x\r\n" + pump,
    "the same before any boundary": lambda pump: pump,
    "the same as content": lambda pump: form(field("file", pump, '; filename="a"')),
    "before it": lambda pump: pump + form(MODEL),
    "behind it": lambda pump: form(MODEL) + pump,
}
PUMPS = {
    "header fields": LINE,
    "line ends": b"\r\n",
    "almost boundaries": b"\r\n--",
    "a line": b"a",
}


@pytest.mark.parametrize("pump", PUMPS.values(), ids=list(PUMPS))
@pytest.mark.parametrize("make", HOSTILE.values(), ids=list(HOSTILE))
def test_anything_is_read_or_refused_in_linear_time(
    make: Callable[[bytes], bytes], pump: bytes
) -> None:
    def read(size: int) -> None:
        with suppress(BadRequest):
            asyncio.run(read_form(TYPE, make(pump * (size // len(pump)))))

    assert is_linear(read, 2_000_000)
