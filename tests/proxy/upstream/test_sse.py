"""Events out of bytes, wherever the bytes are cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.upstream import http1
from proxy.upstream.http1 import InvalidEvent, Splitter, data_of, members_of

EVENTS = [b"data: 1\n\n", b":\n\n", b"event: a\r\ndata: 2\r\n\r\n", b"data: 3\r\r", b"data: 4\n\n"]


@given(st.lists(st.integers(0, 60), max_size=20))
def test_wherever_the_bytes_are_cut_the_same_events_come_out(cuts: list[int]) -> None:
    stream = b"".join(EVENTS)
    edges = [0, *sorted(cuts), len(stream)]
    splitter = Splitter()
    pieces = [stream[a:b] for a, b in pairwise(edges)]
    events = [event for piece in pieces for event in splitter.feed(piece)]
    assert b"".join(events) + splitter.take_rest() == stream
    assert [data_of(event) for event in events if data_of(event)] == [b"1", b"2", b"3", b"4"]


def test_a_line_end_of_two_bytes_ends_no_event() -> None:
    assert Splitter().feed(b"".join(EVENTS)) == EVENTS


def test_half_an_event_is_kept_until_it_is_whole() -> None:
    splitter = Splitter()
    assert splitter.feed(b"data: 1\n") == []
    assert splitter.feed(b"\ndata: 2") == [b"data: 1\n\n"]
    assert splitter.take_rest() == b"data: 2"
    assert splitter.take_rest() == b""


def test_an_event_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "EVENT_MAX_BYTES", 100)
    splitter = Splitter()
    splitter.feed(b"data: " + b"x" * 90)
    with pytest.raises(InvalidEvent, match="longer than 100 bytes"):
        splitter.feed(b"x" * 5)


def test_an_event_too_long_is_not_taken_because_its_end_came_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http1, "EVENT_MAX_BYTES", 10)
    with pytest.raises(InvalidEvent, match="longer"):
        Splitter().feed(b"data: " + b"x" * 90 + b"\n\n")


def test_data_over_several_lines_is_one() -> None:
    assert data_of(b"event: x\ndata: a\ndata:b\n\n") == b"a\nb"


@pytest.mark.parametrize("event", [b":\n\n", b"data: [DONE]\n\n", b"data: null\n\n", b"id: 1\n\n"])
def test_what_carries_no_object_has_no_members(event: bytes) -> None:
    assert members_of(event) is None


def test_what_is_not_json_is_garbled() -> None:
    with pytest.raises(InvalidEvent, match="not JSON"):
        members_of(b"data: <html>\n\n")


ANY_EVENT = st.sampled_from(
    [
        b'data: {"a": 1}\n\n',
        b'data: {"b": "x"}\r\n\r\n',
        b'data: {"c":\ndata: 2}\n\n',
        b'event: e\ndata: {"d": 3}\n\n',
        b'data: {"e": 4}\nid: 5\n\n',
        b"data: [1]\n\n",
        b"data: {}\n\n",
        b"data: [DONE]\n\n",
        b":\n\n",
    ]
)


@given(st.lists(ANY_EVENT, max_size=8), st.lists(st.integers(0, 200), max_size=6))
def test_wherever_the_bytes_are_cut_the_objects_are_those_of_each_event(
    events: list[bytes], cuts: list[int]
) -> None:
    stream, splitter = b"".join(events), Splitter()
    edges = [0, *sorted(cuts), len(stream)]
    objects = [value for a, b in pairwise(edges) for value in splitter.objects(stream[a:b])]
    assert objects == [members for event in events if (members := members_of(event)) is not None]
    assert splitter.has_done == (b"data: [DONE]\n\n" in events)
    assert splitter.take_rest() == b""


def test_one_event_that_is_not_json_is_invalid_among_others() -> None:
    with pytest.raises(InvalidEvent, match="not JSON"):
        Splitter().objects(b'data: {"a": 1}\n\ndata: {"a": \n\n')


def test_a_value_that_is_no_object_is_left_out_however_the_events_are_joined() -> None:
    joined = b'data: {"a": 1}, 5\n\ndata: {"b": 2}\n\n'
    assert Splitter().objects(joined) == [{"a": 1}, {"b": 2}]
