"""Bytes of a terminal, as keys."""

import pytest

from supervisor.cli.top import decode, flush


@pytest.mark.parametrize(
    ("data", "keys", "rest"),
    [
        (b"jx", ["j", "x"], b""),
        (b"\x1b[A\x1bOB", ["up", "down"], b""),
        (b"\x1b[6~q", ["page down", "q"], b""),
        (b"\x1b[15~\x1b[1;5A\x01\xc3\xa9", [], b""),
        (b"j\x1b", ["j"], b"\x1b"),
        (b"\x1b[1;", [], b"\x1b[1;"),
    ],
    ids=repr,
)
def test_keys_are_read(data: bytes, keys: list[str], rest: bytes) -> None:
    assert decode(data) == (keys, rest)


def test_a_sequence_may_arrive_in_parts() -> None:
    found: list[str] = []
    rest = b""
    for number in b"\x1b[B\x1b[24~k":
        keys, rest = decode(rest + bytes([number]))
        found += keys
    assert (found, rest) == (["down", "k"], b"")


def test_an_escape_that_nothing_follows_is_a_key() -> None:
    assert flush(b"\x1b") == ["escape"]


def test_a_sequence_without_an_end_is_not_kept_for_ever() -> None:
    assert len(decode(b"\x1b[" + b"1" * 100_000)[1]) <= 32
