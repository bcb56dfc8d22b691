"""Compute commands are found in chunks of any size."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from supervisor.rpc.relay import RequestReader

COMMANDS = st.lists(st.tuples(st.integers(0, 18), st.binary(max_size=40)), max_size=20)


def request(command: int, data: bytes = b"") -> bytes:
    return bytes([command]) + len(data).to_bytes(8, "little") + data


@given(COMMANDS, st.lists(st.integers(0, 1000), max_size=30))
def test_every_compute_command_is_counted_once(
    commands: list[tuple[int, bytes]], cuts: list[int]
) -> None:
    stream = b"".join(request(*command) for command in commands)
    bounds = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    reader = RequestReader()
    found = sum(reader.feed(stream[start:end]) for start, end in pairwise(bounds))
    assert found == sum(command in {10, 16} for command, _ in commands)


def test_a_command_counts_when_its_last_byte_is_there() -> None:
    reader, stream = RequestReader(), request(10, bytes([16]) * 20)
    assert reader.feed(stream[:-1]) == 0
    assert reader.feed(stream[-1:] + request(16)[:8]) == 1
    assert reader.feed(request(16)[8:]) == 1
