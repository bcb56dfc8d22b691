"""Lines for a reader that may be slow, or gone."""

import os
from concurrent.futures import ThreadPoolExecutor

from supervisor.cli.desktop_host import LineWriter

_WAITING_MAX = 1024


def missed(count: int) -> str:
    return f"missed {count}"


def test_lines_arrive_in_order() -> None:
    reader, writer = os.pipe()
    lines = LineWriter(writer, missed)
    for number in range(10):
        lines.write(str(number))
    lines.close()
    os.close(writer)
    with os.fdopen(reader) as read:
        assert read.read().split() == [str(number) for number in range(10)]


def test_a_reader_that_stops_loses_the_oldest_lines_and_learns_how_many() -> None:
    reader, writer = os.pipe()
    lines = LineWriter(writer, missed)
    text = "x" * 1000

    def end() -> None:
        lines.close()
        os.close(writer)

    for _ in range(2 * _WAITING_MAX):
        lines.write(text)
    with os.fdopen(reader) as read, ThreadPoolExecutor() as threads:
        threads.submit(end)
        found = read.read().split("\n")[:-1]
    told = [int(line.removeprefix("missed ")) for line in found if line != text]
    assert told
    assert len(found) - len(told) + sum(told) == 2 * _WAITING_MAX


def test_a_reader_that_has_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    lines = LineWriter(writer, missed)
    lines.write("one")
    lines.write("two")
    lines.close()
    os.close(writer)
