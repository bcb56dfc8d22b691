from hypothesis import given
from hypothesis import strategies as st

from supervisor.process.lines import LineSplitter


@given(st.binary(), st.lists(st.integers(1, 9)))
def test_the_same_lines_come_out_however_the_bytes_come_in(data: bytes, sizes: list[int]) -> None:
    splitter, lines, rest = LineSplitter(), [], data
    for size in sizes:
        lines += splitter.feed(rest[:size])
        rest = rest[size:]
    lines += splitter.feed(rest)
    assert lines == data.split(b"\n")[:-1]


def test_what_a_line_has_beyond_the_limit_is_dropped() -> None:
    splitter = LineSplitter(limit_bytes=4)
    assert splitter.feed(b"ab") == []
    assert splitter.feed(b"cdef") == []
    assert splitter.feed(b"gh\nlong enough\nij") == [b"abcd", b"long"]
    assert splitter.feed(b"\n") == [b"ij"]
