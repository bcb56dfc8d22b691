from dataclasses import replace
from pathlib import Path

import pytest
from fakes.slot_files import IDENTITY

from supervisor.slot_store.ineffective import IneffectiveRestores

OTHER = replace(IDENTITY, model="other")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "slots"


def test_an_entry_outlives_the_process(directory: Path) -> None:
    IneffectiveRestores(directory).add("chat", IDENTITY)
    assert IDENTITY in IneffectiveRestores(directory)
    assert OTHER not in IneffectiveRestores(directory)
    assert [path.stat().st_mode & 0o777 for path in directory.iterdir()] == [0o600]


def test_entries_are_forgotten_by_model_or_all(directory: Path) -> None:
    known = IneffectiveRestores(directory)
    known.add("chat", IDENTITY)
    known.add("other", OTHER)
    known.forget("chat")
    assert IDENTITY not in known
    assert OTHER in known
    known.forget()
    assert OTHER not in known
    assert not list(directory.iterdir())
    known.forget()


def test_the_oldest_entries_make_room(directory: Path) -> None:
    known = IneffectiveRestores(directory)
    many = [replace(IDENTITY, model=str(number)) for number in range(70)]
    for one in many:
        known.add("chat", one)
    assert [one in known for one in many] == [False] * 6 + [True] * 64


@pytest.mark.parametrize(
    "harm",
    [
        lambda text: text[:-5],
        lambda text: text.replace(":", ";"),
        lambda _: "[]",
        lambda _: '{"a": 1}',
        lambda _: "[" * 30_000,
        lambda _: "\udcff",
        lambda _: "",
    ],
    ids=["cut", "altered", "another", "of another kind", "deep", "no text", "empty"],
)
def test_an_unreadable_file_counts_as_empty_and_is_replaced(directory: Path, harm: object) -> None:
    known = IneffectiveRestores(directory)
    known.add("chat", IDENTITY)
    assert callable(harm)
    (path,) = directory.iterdir()
    path.write_bytes(harm(path.read_text()).encode("utf-8", "surrogateescape"))
    assert IDENTITY not in known
    known.add("chat", OTHER)
    assert OTHER in known
