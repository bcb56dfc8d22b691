"""An engine's log contains no quotes of requests."""

from __future__ import annotations

import pytest

from supervisor.engine.run import LEFT_OUT, QuotedRequests

STAMP = b"0.03.503.958 "
LOG = (
    STAMP + b"I slot launch_slot_: id  1 | task 57 | processing task\n"
    b'0.03.504.001 W srv    operator(): got exception: {"error":{"message":"SECRET"}}\n'
    b"common_sampler_types_from_names: unable to match sampler by name 'SECRET'\n"
    b"parse: error parsing grammar: Undefined rule identifier 'SECRET'\n"
    b"\n"
    b"root ::= SECRET\n"
    b"SECRET ::= other\n" + STAMP + b"E failed to parse grammar\n"
    b"GGML_ASSERT(n > 0) failed\n"
    b"no end of the last line"
)
KEPT = (
    STAMP + b"I slot launch_slot_: id  1 | task 57 | processing task\n"
    b"0.03.504.001 W srv    operator(): got exception: " + LEFT_OUT + b"\n"
    b"common_sampler_types_from_names: unable to match sampler by name " + LEFT_OUT + b"\n"
    b"parse: error parsing grammar: " + LEFT_OUT + b"\n" + STAMP + b"E failed to parse grammar\n"
    b"GGML_ASSERT(n > 0) failed\n"
    b"no end of the last line"
)


def passed(log: bytes, piece_bytes: int) -> bytes:
    quoted = QuotedRequests()
    pieces = [log[at : at + piece_bytes] for at in range(0, len(log), piece_bytes)]
    return b"".join(map(quoted.feed, pieces)) + quoted.flush()


@pytest.mark.parametrize("piece_bytes", [1, 7, 64, 10_000])
def test_quotes_are_left_out_however_the_log_arrives(piece_bytes: int) -> None:
    assert passed(LOG, piece_bytes) == KEPT


@pytest.mark.parametrize("piece_bytes", [100, 5000, 100_000])
def test_long_lines_are_not_held(piece_bytes: int) -> None:
    plain, quote = b"x" * 50_000, b"W got exception: " + b"y" * 50_000
    found = passed(plain + b"\n" + quote + b"\nend\n", piece_bytes)
    assert found == plain + b"\nW got exception: " + LEFT_OUT + b"\nend\n"


def test_a_grammar_without_a_line_behind_it_ends_nothing_for_good() -> None:
    quoted = QuotedRequests()
    quoted.feed(b"parse: error parsing grammar: x\n" + b"SECRET\n" * 10_000)
    assert quoted.feed(b"later\n") == b"later\n"
