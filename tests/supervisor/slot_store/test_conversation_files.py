"""Which files are of one conversation."""

from __future__ import annotations

import pytest

from supervisor.errors import NoSuchConversation
from supervisor.slot_store.manifest import find_conversation, find_file

FILES = {"ab1": (1, 2), "ab2": (2, 3), "cd": (3, 4), "other": (8, 9), "prefix": ()}


def test_files_that_share_turns_with_each_other_are_of_one_conversation() -> None:
    names, turns = find_conversation(FILES, (4, 5))
    assert set(names) == {"ab1", "ab2", "cd"}
    assert turns == {1, 2, 3, 4, 5}
    assert find_conversation(FILES, ()) == ([], frozenset())


def test_a_file_is_named_by_a_beginning_that_no_other_has() -> None:
    assert find_file(FILES, "cd") == find_file(FILES, "c") == "cd"
    for name in ("ab", "", "../cd", "x"):
        with pytest.raises(NoSuchConversation):
            find_file(FILES, name)
