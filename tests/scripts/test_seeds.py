"""The table of seed items and their tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import seeds

ROOT = Path(__file__).parent.parent.parent
# In two parts, so that this file is no test of a seed.
SEED = "Seed" + " 003"
TESTS = f'''
def test_status():
    """{SEED}: GpuStatusResponse."""
    assert answer["cache_ready"]

async def test_of_{SEED.replace(" ", "_").lower()}():
    """GpuStatusResponse: cache_ready."""

def test_of_another_seed():
    """{SEED}1: GpuStatusResponse.cache_ready."""

def helper():
    """{SEED}: GpuStatusResponse.cache_ready."""
'''


def held_by(tmp_path: Path, name: str) -> list[str]:
    (tmp_path / "test_a.py").write_text(TESTS)
    tests = seeds.tests_below(tmp_path, tmp_path)
    return [one.partition("::")[2] for one in seeds.Item("003", name).tests(tests)]


def test_every_item_has_a_test() -> None:
    items = seeds.items_of((ROOT / "scripts" / "seeds.toml").read_text("utf-8"))
    tests = seeds.tests_below(ROOT / "tests", ROOT)
    assert {item.seed for item in items} == {"000", "001", "002", "003"}
    assert [f"{item.seed} {item.name}" for item in items if not item.tests(tests)] == []


def test_an_item_is_held_by_tests_that_name_its_seed_and_all_its_words(tmp_path: Path) -> None:
    assert held_by(tmp_path, "GpuStatusResponse.cache_ready") == [
        "test_status",
        "test_of_seed_003",
    ]
    assert held_by(tmp_path, "GpuStatusResponse.cache") == []


def test_the_docstring_of_a_file_names_the_seed_of_all_its_tests(tmp_path: Path) -> None:
    (tmp_path / "test_b.py").write_text(f'"""{SEED}."""\ndef test_x():\n    y\n')
    assert held_by(tmp_path, "y") == ["test_x"]


def test_the_table_has_a_line_for_each_test() -> None:
    tests = [seeds.SeedTest(name, frozenset({"003"}), frozenset({"a"})) for name in ("x", "y")]
    items = [seeds.Item("003", "a"), seeds.Item("003", "b.c")]
    assert seeds.table(items, tests).splitlines() == [
        "003  a    x",
        "          y",
        "003  b.c  NO TEST",
    ]


def test_the_script_fails_where_an_item_has_no_test(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = tmp_path / "seeds.toml"
    monkeypatch.setattr(seeds, "_ITEMS", listed)
    listed.write_text('["003"]\nitems = ["GpuStatusResponse.cache_ready"]\n')
    assert seeds.main() == 0
    listed.write_text('["003"]\nitems = ["GpuStatusResponse.nothing_of_that_kind"]\n')
    assert seeds.main() == 1
    assert "1 items without a test" in capsys.readouterr().out
