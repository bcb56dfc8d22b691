from dataclasses import replace
from pathlib import Path

import pytest
from support.slot_files import IDENTITY

from supervisor.slot_store.store import RestoreOutcome, RestoreOutcomes

OTHER = replace(IDENTITY, model="other")
USED = RestoreOutcome("chat", 790, 775)
UNUSED = RestoreOutcome("other", 790, 0, "it used nothing")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "slots"


def test_an_outcome_outlives_the_process(directory: Path) -> None:
    RestoreOutcomes(directory).set(IDENTITY, USED)
    assert RestoreOutcomes(directory).get(IDENTITY) == USED
    assert RestoreOutcomes(directory).get(OTHER) is None
    assert [path.stat().st_mode & 0o777 for path in directory.iterdir()] == [0o600]


def test_a_later_outcome_replaces_an_earlier_one(directory: Path) -> None:
    known = RestoreOutcomes(directory)
    known.set(IDENTITY, USED)
    known.set(IDENTITY, UNUSED)
    assert known.get(IDENTITY) == UNUSED


@pytest.mark.parametrize(
    ("change", "is_known"),
    [({"options": ("--cache-type-k f16", "--parallel 4")}, True), ({"engine": "b11434"}, False)],
)
def test_an_outcome_is_of_one_build_with_any_number_of_slots(
    directory: Path, change: dict[str, object], *, is_known: bool
) -> None:
    known = RestoreOutcomes(directory)
    known.set(IDENTITY, USED)
    assert bool(known.get(replace(IDENTITY, **change))) == is_known  # type: ignore[arg-type]


def test_outcomes_are_forgotten_by_model_or_all(directory: Path) -> None:
    known = RestoreOutcomes(directory)
    known.set(IDENTITY, USED)
    known.set(OTHER, UNUSED)
    known.forget("chat")
    assert known.get(IDENTITY) is None
    assert known.get(OTHER)
    known.forget()
    assert known.get(OTHER) is None
    assert not list(directory.iterdir())
    known.forget()


def test_the_oldest_outcomes_make_room(directory: Path) -> None:
    known = RestoreOutcomes(directory)
    many = [replace(IDENTITY, model=str(number)) for number in range(70)]
    for entry in many:
        known.set(entry, USED)
    assert [bool(known.get(entry)) for entry in many] == [False] * 6 + [True] * 64


@pytest.mark.parametrize(
    "harm",
    [
        lambda text: text[:-5],
        lambda text: text.replace(":", ";"),
        lambda text: text.replace("model", "else"),
        lambda _: "[]",
        lambda _: '{"a": 1}',
        lambda _: "[" * 30_000,
        lambda _: "\udcff",
        lambda _: "",
    ],
    ids=["cut", "altered", "renamed", "another", "of another kind", "deep", "no text", "empty"],
)
def test_an_unreadable_file_counts_as_empty_and_is_replaced(directory: Path, harm: object) -> None:
    known = RestoreOutcomes(directory)
    known.set(IDENTITY, USED)
    assert callable(harm)
    (path,) = directory.iterdir()
    path.write_bytes(harm(path.read_text()).encode("utf-8", "surrogateescape"))
    assert known.get(IDENTITY) is None
    known.set(OTHER, UNUSED)
    assert known.get(OTHER) == UNUSED
