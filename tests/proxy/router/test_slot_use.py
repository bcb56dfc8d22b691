"""The use of an aborted request, by its progress and by its slot's content."""

from __future__ import annotations

import pytest

from proxy.router.lease import ResponseProgress, Tokens, cut_off_tokens


def progress(done: int, total: int, cached: int, events: int) -> ResponseProgress:
    found = ResponseProgress(lambda: 0.0)
    found.set_prompt(done, total, cached)
    for _ in range(events):
        found.count_token()
    return found


# Measured on build 10434: of a prompt of 193 tokens, 1 of them cached, cut off after 30 events, the
# engine counted 192 and 32 tokens, and 224 were in the slot; of one of 3529, cut off in prefill, it
# counted 384, and 385 were in the slot.
@pytest.mark.parametrize(
    ("read", "held", "expected"),
    [
        (progress(193, 193, 1, 30), [224, 0, 900], (Tokens(192, 1, 32), True)),
        (progress(257, 3529, 1, 0), [0, 385, 82], (Tokens(384, 1, 0), True)),
        (progress(257, 3529, 1, 0), [82], (Tokens(256, 1, 0), False)),
        (progress(193, 193, 1, 30), [500], (Tokens(192, 1, 30), False)),
        (progress(60, 193, 1, 0), [193], (Tokens(192, 1, 1), True)),
        (ResponseProgress(lambda: 0.0), [224], (Tokens(), False)),
    ],
)
def test_the_slot_shows_the_computed_tokens(
    read: ResponseProgress, held: list[int], expected: tuple[Tokens, bool]
) -> None:
    assert cut_off_tokens(read, held) == expected
