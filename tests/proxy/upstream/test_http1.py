"""Responses in pieces of any size, and bytes that are none."""

from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.upstream.http1 import InvalidResponse, Response

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n"
COUNTED = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"


def read(*pieces: bytes, method: str = "POST") -> tuple[Response, bytes]:
    """Return a response after these bytes and then the end of the connection, and its body."""
    response = Response(method)
    body = b"".join(response.whole_chunk(piece) or response.feed(piece) for piece in pieces)
    response.end()
    return response, body


def chunked(*contents: bytes) -> bytes:
    return (
        b"".join(b"%x\r\n%b\r\n" % (len(content), content) for content in contents) + b"0\r\n\r\n"
    )


@given(
    contents=st.lists(st.binary(min_size=1, max_size=40), max_size=8),
    cuts=st.lists(st.integers(0, 600), max_size=12),
)
def test_a_chunked_body_is_the_same_however_it_was_cut(
    contents: list[bytes], cuts: list[int]
) -> None:
    whole = CHUNKED + chunked(*contents)
    edges = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    pieces = [whole[start:end] for start, end in pairwise(edges)]
    response, body = read(*pieces)
    assert (response.status, response.is_over, body) == (200, True, b"".join(contents))


@pytest.mark.parametrize(
    ("before", "data", "content"),
    [
        (CHUNKED, b"2\r\nok\r\n", b"ok"),
        (CHUNKED + b"1\r\na\r\n", b"a\r\n0123456789\r\n", b"0123456789"),
        (CHUNKED, b"02\r\nok\r\n", b""),
        (CHUNKED, b"2;a=b\r\nok\r\n", b""),
        (CHUNKED, b"2\r\nok\r\n2\r\nok\r\n", b""),
        (CHUNKED, b"4\r\no\r\nk\r\n", b"o\r\nk"),
        (CHUNKED, b"2\r\nok\r\n\r\n", b""),
        (CHUNKED, b"2\r\nok", b""),
        (CHUNKED, b"0\r\n\r\n", b""),
        (CHUNKED + b"b\r\n", b"2\r\nok\r\n", b""),
        (CHUNKED + b"1\r\na", b"\r\n2\r\nok\r\n", b""),
        (COUNTED % 7, b"2\r\nok\r\n", b""),
    ],
)
def test_one_whole_chunk_is_told_from_other_bytes(
    before: bytes, data: bytes, content: bytes
) -> None:
    response = Response("POST")
    response.feed(before)
    assert response.whole_chunk(data) == content


@given(content=st.binary(max_size=40), extra=st.binary(max_size=9), size=st.integers(1, 9))
def test_a_counted_body_ends_where_it_said_it_would(
    content: bytes, extra: bytes, size: int
) -> None:
    whole = COUNTED % len(content) + content + extra
    response, body = read(*(whole[at : at + size] for at in range(0, len(whole), size)))
    assert (response.is_over, body) == (True, content)


@given(st.lists(st.binary(max_size=60), max_size=6))
def test_bytes_of_any_kind_are_read_or_refused_and_nothing_else(pieces: list[bytes]) -> None:
    for head in (b"", b"HTTP/1.1 200 OK\r\n", CHUNKED, COUNTED % 30):
        with suppress(InvalidResponse):
            response, body = read(head, *pieces)
            assert len(body) <= sum(map(len, pieces))
            assert response.is_over or not response.end()


def test_the_fields_are_there_as_they_were_sent() -> None:
    response, _ = read(b"HTTP/1.0 404 Not Found\r\nX-One:  a b \t\r\nx-two:\r\nX-ONE: c\r\n\r\n")
    assert response.status == 404
    assert list(response.headers.items()) == [("X-One", "a b"), ("x-two", ""), ("X-ONE", "c")]


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    response = Response("GET")
    assert response.feed(b"HTTP/1.1 200 OK\r\n\r\nab") == b"ab"
    assert not response.is_over
    assert response.end()


@pytest.mark.parametrize("cut", [CHUNKED + b"5\r\nab", COUNTED % 9 + b"ab", b"HTTP/1.1 200 OK\r\n"])
def test_an_answer_that_was_cut_short_is_not_complete(cut: bytes) -> None:
    response, _ = read(cut)
    assert not response.is_over


@pytest.mark.parametrize(
    ("method", "status"), [("HEAD", b"200 OK"), ("GET", b"204 No Content"), ("GET", b"304 No")]
)
def test_some_answers_have_no_body_despite_their_header(method: str, status: bytes) -> None:
    response, body = read(
        b"HTTP/1.1 %b\r\nContent-Length: 9\r\n\r\n123456789" % status, method=method
    )
    assert (response.is_over, body) == (True, b"")


def test_interim_responses_are_passed_over() -> None:
    early = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: a\r\n\r\n"
    response, body = read(early + COUNTED % 2 + b"ok")
    assert (response.status, dict(response.headers), body) == (200, {"Content-Length": "2"}, b"ok")


def test_extensions_of_chunks_and_trailers_are_dropped() -> None:
    response, body = read(CHUNKED + b'2;a="b"\r\nok\r\n000 ;x\r\nTrailer: 1\r\nAnother: 2\r\n\r\n')
    assert (response.is_over, body) == (True, b"ok")
    assert "Trailer" not in response.headers


def test_the_same_length_twice_is_that_length() -> None:
    _, body = read(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok")
    assert body == b"ok"


@pytest.mark.parametrize(
    "head",
    [
        b"SSH-2.0-OpenSSH_9.2",
        b"HTTP/2 200 OK",
        b"HTTP/1.1 20 OK",
        b"HTTP/1.1 999 OK",
        b"HTTP/1.1 101 Switching Protocols",
        b"HTTP/1.1 200 OK\r\nno colon",
        b"HTTP/1.1 200 OK\r\n: nameless",
        b"HTTP/1.1 200 OK\r\nwith space : a",
        b"HTTP/1.1 200 OK\r\nA: folded\r\n line",
        b"HTTP/1.1 200 OK\r\nA: b\nB: bare line feed",
        b"HTTP/1.1 200 OK\r\nA: b\rB: bare return",
        b"HTTP/1.1 200 OK\r\nA: \0",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1",
        b"HTTP/1.1 200 OK\r\nContent-Length: +1",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1_0",
        b"HTTP/1.1 200 OK\r\nContent-Length: \xd9\xa3",
        b"HTTP/1.1 200 OK\r\nContent-Length: ",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5, 5",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9999999999999999999999",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nTransfer-Encoding: chunked",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: identity",
    ],
)
def test_a_head_that_leaves_a_doubt_is_refused(head: bytes) -> None:
    with pytest.raises(InvalidResponse):
        read(head + b"\r\n\r\n")


@pytest.mark.parametrize(
    "framing",
    [
        b"\r\n",
        b"x\r\n",
        b"-1\r\n",
        b"0x2\r\nok",
        b" 2\r\nok",
        b"2\nok\r\n",
        b"2\r\nokay\r\n",
        b"2\r\nok3\r\n",
        b"1" * 16 + b"\r\n",
    ],
)
def test_a_chunk_that_leaves_a_doubt_is_refused(framing: bytes) -> None:
    with pytest.raises(InvalidResponse):
        read(CHUNKED + framing)


@pytest.mark.parametrize(
    ("beginning", "more"),
    [
        (b"HTTP/1.1 200 ", b"x"),
        (b"HTTP/1.1 200 OK\r\nA: ", b"x"),
        (b"HTTP/1.1 200 OK\r\n", b"A: b\r\n"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (CHUNKED, b"1"),
        (CHUNKED + b"1;", b"x"),
        (CHUNKED + b"1\r\nx", b"x"),
        (CHUNKED + b"0\r\n", b"A: b\r\n"),
        (CHUNKED + b"0\r\nA: ", b"x"),
    ],
)
def test_nothing_that_never_ends_is_kept(beginning: bytes, more: bytes) -> None:
    with pytest.raises(InvalidResponse):
        read(beginning, *[more * (1024 // len(more))] * 200)
