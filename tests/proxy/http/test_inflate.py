"""Compressed bodies: decompressed, and refused."""

import gzip
import zlib

import pytest

from proxy.errors import BadRequest, BodyExpands, UnknownCoding
from proxy.http.body import Inflater

TEXT = b"".join(b"%d " % number for number in range(100_000))


def inflated(coding: str, packed: bytes, piece: int = 1000, max_ratio: float = 100) -> bytes:
    inflater = Inflater(coding, max_ratio)
    text = b"".join(
        made
        for start in range(0, len(packed), piece)
        for made in inflater.feed(packed[start : start + piece])
    )
    inflater.close()
    return text


def raw(text: bytes) -> bytes:
    return zlib.compress(text, wbits=-zlib.MAX_WBITS)


@pytest.mark.parametrize(
    ("coding", "packed"),
    [
        ("gzip", gzip.compress(TEXT)),
        ("X-GZIP ", gzip.compress(TEXT)),
        ("deflate", zlib.compress(TEXT)),
        ("deflate", raw(TEXT)),
    ],
)
@pytest.mark.parametrize("piece", [1, 1_000_000])
def test_a_body_is_decompressed(coding: str, packed: bytes, piece: int) -> None:
    assert inflated(coding, packed, piece) == TEXT


@pytest.mark.parametrize("coding", ["br", "zstd", "gzip, gzip", "gzip,br", "identity"])
def test_other_codings_are_not_known(coding: str) -> None:
    with pytest.raises(UnknownCoding, match="gzip, deflate"):
        Inflater(coding, 100)


@pytest.mark.parametrize(
    "packed",
    [
        pytest.param(b"garbage", id="garbage"),
        pytest.param(gzip.compress(TEXT)[:-9], id="cut short"),
        pytest.param(gzip.compress(TEXT) * 2, id="two in one"),
        pytest.param(gzip.compress(TEXT)[:-8] + bytes(8), id="another checksum"),
    ],
)
def test_what_is_no_whole_stream_is_a_bad_request(packed: bytes) -> None:
    with pytest.raises(BadRequest):
        inflated("gzip", packed)


def test_a_bomb_is_refused_long_before_its_end() -> None:
    packed = gzip.compress(bytes(60_000_000))
    inflater = Inflater("gzip", 100)
    made: list[int] = []
    with pytest.raises(BodyExpands, match="max_body_ratio"):
        made.extend(map(len, inflater.feed(packed)))
    assert 1024**2 - 128 * 1024 <= sum(made) <= 100 * len(packed)


def test_a_small_body_may_become_a_mebibyte_at_any_ratio() -> None:
    text = b"1," * (512 * 1024)
    assert inflated("gzip", gzip.compress(text)) == text
