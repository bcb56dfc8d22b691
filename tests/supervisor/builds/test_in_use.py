from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.builds.installed import InUse, read_in_use, write_in_use

HERE = frozenset({"b1-cpu", "b2-cpu", "b3-cpu"})


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert read_in_use(tmp_path) == InUse()
    used = InUse().use("b1-cpu").use("b2-cpu")
    write_in_use(tmp_path, used)
    assert read_in_use(tmp_path) == used == InUse("b2-cpu", (None, "b1-cpu"))


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"current": 1, "previous": []}', '{"current": "../x", "previous": []}']
)
def test_a_damaged_file_names_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "in_use.json").write_text(text)
    assert read_in_use(tmp_path) == InUse()


def test_each_rollback_goes_one_build_further_back() -> None:
    used = InUse().use("b1-cpu").use("b2-cpu").use("b2-cpu").use("b3-cpu")
    names = []
    while back := used.roll_back(HERE):
        used = back
        names.append(used.current)
    assert names == ["b2-cpu", "b1-cpu", None]


def test_a_build_that_was_removed_is_skipped() -> None:
    used = InUse().use("b1-cpu").use("b2-cpu").use("b3-cpu")
    back = used.roll_back(HERE - {"b2-cpu"})
    assert back
    assert back.current == "b1-cpu"


def test_the_list_is_bounded() -> None:
    used = InUse()
    for number in range(1, 100):
        used = used.use(f"b{number}-cpu")
    assert len(used.previous) == 16
