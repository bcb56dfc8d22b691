from dataclasses import replace
from typing import Any

import pytest
from support.instance_harness import RecordingTraffic
from support.slot_files import IDENTITY, manifest

from proxy.cache.fingerprint import ConversationFingerprint
from supervisor.slot_store.file_index import Catalogue, key_digest

GIB = 1024**3
KEY = key_digest("chat", IDENTITY)


def text(turns: tuple[int, ...], *blocks: int) -> str:
    return ConversationFingerprint(turns, blocks).to_ascii()


def replaced(old: str, new: str, tokens: int = 700, **changes: Any) -> bool:
    catalogue = Catalogue(RecordingTraffic())
    catalogue.add(manifest("old", fingerprint=old, tokens=tokens, **changes))
    later = manifest("new", 1, **{**changes, "fingerprint": new, "tokens": 1000})
    file = catalogue.add(later).file
    return catalogue.find_replaced(file, 256) == ["old"]


FIRST = text((1, 2), *range(40))


@pytest.mark.parametrize(
    ("new", "is_replaced"),
    [
        (text((2, 3, 4), *range(60)), True),
        (text((1, 9), *range(30), *range(90, 99)), True),  # its end was edited
        (text((1, 9), *range(20), *range(90, 99)), False),  # more than that was
        (text((7, 8), *range(60)), True),  # after a restart
        (text((7, 8), *range(39), 99), False),
        (text((), *range(60)), False),
    ],
)
def test_a_later_turn_replaces_an_earlier_one(new: str, *, is_replaced: bool) -> None:
    assert replaced(FIRST, new) is is_replaced


def test_without_a_common_turn_most_of_the_old_file_must_be_in_the_new_one() -> None:
    later = text((7, 8), *range(60))
    assert not replaced(FIRST, later, tokens=1300)  # a long answer, perhaps another one
    recurrent = replace(IDENTITY, state_bytes=8)
    assert not replaced(FIRST, later, identity=recurrent)
    assert replaced(FIRST, text((2, 3), *range(60)), identity=recurrent)


def test_prefixes_of_other_lengths_are_kept_beside_each_other() -> None:
    assert replaced(text((), *range(40)), text((), *range(45)))
    assert not replaced(text((), *range(40)), text((), *range(80)))
    assert not replaced(text((), *range(40)), text((1,), *range(80)))


def test_beginnings_of_a_state_are_kept_beside_each_other() -> None:
    def of(beginning: int) -> str:
        return ConversationFingerprint((), tuple(range(40)), beginning=beginning).to_ascii()

    recurrent = replace(IDENTITY, state_bytes=8)
    assert replaced(of(1), of(1), identity=recurrent)
    assert not replaced(of(1), of(2), identity=recurrent)
    assert replaced(of(1), of(2))


def test_what_a_file_holds_already_is_not_saved_again() -> None:
    catalogue = Catalogue(RecordingTraffic())
    catalogue.add(manifest("a", fingerprint=FIRST, tokens=700))
    its = ConversationFingerprint((1, 2), tuple(range(40)))
    assert catalogue.holds(KEY, 702, its)
    assert not catalogue.holds(KEY, 703, its)
    assert not catalogue.holds("other", 700, its)
    assert catalogue.holds(KEY, 700, ConversationFingerprint((), tuple(range(30))))
    assert not catalogue.holds(KEY, 700, ConversationFingerprint((), tuple(range(41))))
    catalogue.remove(["a"])
    assert not catalogue.holds(KEY, 700, its)


@pytest.mark.parametrize(
    ("size_bytes", "tokens", "turns", "blocks", "is_held"),
    [
        (4 * GIB, 32_000, (1, 2, 3), 2010, True),  # a second of computing, four of writing
        (4 * GIB, 33_025, (1, 2, 3), 2010, False),
        (GIB // 4, 32_064, (1, 2, 3), 2010, True),
        (GIB // 4, 32_065, (1, 2, 3), 2010, False),
        (4 * GIB, 32_000, (1, 9), 2010, False),  # another answer to the same question
        (4 * GIB, 32_000, (1, 2, 3), 1900, False),  # an edited prompt
    ],
)
def test_a_large_file_is_not_written_again_for_few_tokens(
    size_bytes: int, tokens: int, turns: tuple[int, ...], blocks: int, *, is_held: bool
) -> None:
    catalogue = Catalogue(RecordingTraffic())
    first = text((1, 2), *range(2000))
    catalogue.add(manifest("a", fingerprint=first, tokens=32_000, size_bytes=size_bytes))
    later = ConversationFingerprint(turns, tuple(range(blocks)))
    assert catalogue.holds(KEY, tokens, later) is is_held
