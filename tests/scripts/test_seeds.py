"""The table of seed items and their tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import seeds

ROOT = Path(__file__).parent.parent.parent
HERE = "tests/scripts/test_seeds.py::test_every_item_has_tests_that_are_there"


def test_every_item_has_tests_that_are_there() -> None:
    items = seeds.items_of((ROOT / "scripts" / "seeds.toml").read_text("utf-8"))
    assert {item.seed for item in items} == {"000", "001", "002", "003"}
    assert list(seeds.faults(items, ROOT)) == []


def test_an_item_without_a_test_and_a_test_that_is_gone_are_faults() -> None:
    items = [
        seeds.Item("003", "a", [HERE]),
        seeds.Item("003", "b", []),
        seeds.Item("003", "c", [f"{HERE}_and_more", "tests/test_gone.py::test_x"]),
    ]
    assert list(seeds.faults(items, ROOT)) == [
        "003 b: no test",
        f"003 c: there is no {HERE}_and_more",
        "003 c: there is no tests/test_gone.py::test_x",
    ]


def test_the_table_has_a_line_for_each_test() -> None:
    items = [seeds.Item("003", "a", ["x", "y"]), seeds.Item("003", "b.c", ["z"])]
    assert seeds.table(items).splitlines() == ["003  a    x", "003  a    y", "003  b.c  z"]


def test_the_script_fails_if_an_item_has_no_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = tmp_path / "seeds.toml"
    listed.write_text(f'["003".items]\n"a" = ["{HERE}"]\n')
    assert seeds.main(listed) == 0
    listed.write_text('["003".items]\n"a" = []\n')
    assert seeds.main(listed) == 1
    assert "003 a: no test\n1 items, 1 faults" in capsys.readouterr().out
