import os
from pathlib import Path

import pytest
from fakes.slot_files import label, write

from supervisor.fleet.slots import quarantine
from supervisor.fleet.slots.check import Unfit
from supervisor.fleet.slots.manifest import Manifest
from supervisor.fleet.slots.shelf import Shelf
from supervisor.fleet.slots.worth import Budget
from supervisor.life.slots import Moved

PLENTY = Budget(1 << 30)


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path / "slots")


def put(shelf: Shelf, first: int, minutes: int = 0, budget: Budget = PLENTY) -> Manifest:
    """Adopt a conversation of 300 tokens that begins with this one."""
    spooled = shelf.spool("chat.0") / f"{first}.new"
    moved = write(spooled, range(first, first + 300))
    found = shelf.adopt(spooled, label(minutes), moved, budget)
    assert found
    return found


def names(shelf: Shelf) -> set[str]:
    return {path.name for path in shelf.root.rglob("*") if path.is_file()}


def test_what_was_adopted_is_kept_and_gone_from_the_spool(shelf: Shelf) -> None:
    one = put(shelf, 1000)
    assert shelf.kept() == shelf.kept("chat") == [one]
    assert shelf.kept("other") == []
    assert names(shelf) == {"1000.slot", "1000.json"}


def test_a_file_that_is_not_what_the_engine_says_is_not_kept(shelf: Shelf) -> None:
    for told in (Moved(300, 7), Moved(299, 0)):
        spooled = shelf.spool("chat.0") / "a.new"
        moved = write(spooled, range(300))
        with pytest.raises(Unfit):
            shelf.adopt(
                spooled, label(), Moved(told.tokens, told.size_bytes or moved.size_bytes), PLENTY
            )
        assert names(shelf) == set()


def test_beyond_the_budget_the_oldest_leaves(shelf: Shelf) -> None:
    budget = Budget(1 << 30, files_a_model=2)
    kept = [put(shelf, 1000 * number, number, budget) for number in (1, 2, 3)]
    assert [one.name for one in shelf.kept()] == [one.name for one in kept[1:]]
    assert names(shelf) == {"2000.slot", "2000.json", "3000.slot", "3000.json"}


def test_what_is_lent_is_a_link_to_what_was_verified(shelf: Shelf) -> None:
    one = put(shelf, 1000)
    link = shelf.lend(one, shelf.spool("chat.0"))
    assert link.name == "1000.slot"
    assert link.read_bytes() == (shelf.root / "kept" / "chat" / "1000.slot").read_bytes()


def test_what_was_altered_is_not_lent(shelf: Shelf) -> None:
    one = put(shelf, 1000)
    path = shelf.root / "kept" / "chat" / "1000.slot"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(Unfit, match="altered"):
        shelf.lend(one, shelf.spool("chat.0"))
    path.unlink()
    with pytest.raises(Unfit, match="cannot be read"):
        shelf.lend(one, shelf.spool("chat.0"))


def test_what_a_dead_daemon_left_half_done_is_swept(shelf: Shelf) -> None:
    put(shelf, 1000)
    kept = shelf.root / "kept" / "chat"
    for name in ("orphan.slot", "draft.tmp", "0.json"):
        (kept / name).write_bytes(b"x")
    (shelf.spool("chat.0") / "half.new").write_bytes(b"x")
    (shelf.root / "kept" / "empty").mkdir()
    assert [one.name for one in shelf.sweep(PLENTY)] == ["0"]
    assert names(shelf) == {"1000.slot", "1000.json", "0.json"}
    assert shelf.quarantine.names() == ["0.json"]
    assert not (shelf.root / "kept" / "empty").exists()


def test_what_is_beyond_a_smaller_budget_is_swept(shelf: Shelf) -> None:
    put(shelf, 1000)
    shelf.sweep(Budget(10))
    assert shelf.kept() == []


def test_the_quarantine_is_bounded_in_number_bytes_and_age(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quarantine, "_FILES_MAX", 4)
    for number in range(4):
        shelf.reject(put(shelf, 1000 * number), "for a test")
    assert len(shelf.quarantine.names()) == 4
    monkeypatch.setattr(quarantine, "_SIZE_MAX_BYTES", 10)
    shelf.quarantine.bound()
    assert shelf.quarantine.names() == []


def test_to_forget_empties_the_quarantine_too(shelf: Shelf) -> None:
    shelf.reject(put(shelf, 1000), "for a test")
    put(shelf, 2000)
    assert [one.name for one in shelf.forget()] == ["2000"]
    assert names(shelf) == set()


def test_a_name_from_outside_is_compared_and_never_a_path(shelf: Shelf, tmp_path: Path) -> None:
    put(shelf, 1000)
    (tmp_path / "precious").mkdir()
    assert shelf.forget("../../precious") == []
    assert (tmp_path / "precious").exists()
    assert len(shelf.kept()) == 1


def test_a_disk_that_refuses_the_manifest_keeps_nothing(
    shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, os.strerror(28))

    spooled = shelf.spool("chat.0") / "a.new"
    moved = write(spooled, range(300))
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        shelf.adopt(spooled, label(), moved, PLENTY)
    assert names(shelf) == set()
