"""What is remembered of caches that were put back in vain, and what a broken file says."""

from dataclasses import replace
from pathlib import Path

import pytest
from fakes.slot_files import IDENTITY

from supervisor.slot_store.ineffective import IneffectiveRestores

OTHER = replace(IDENTITY, model="other")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "slots" / "disproved.json"


def test_it_is_remembered_by_whoever_comes_next(path: Path) -> None:
    IneffectiveRestores(path).add("chat", IDENTITY)
    assert IDENTITY in IneffectiveRestores(path)
    assert OTHER not in IneffectiveRestores(path)
    assert path.stat().st_mode & 0o777 == 0o600


def test_it_is_forgotten_by_model_or_whole(path: Path) -> None:
    known = IneffectiveRestores(path)
    known.add("chat", IDENTITY)
    known.add("other", OTHER)
    known.forget("chat")
    assert IDENTITY not in known
    assert OTHER in known
    known.forget()
    assert OTHER not in known
    assert not path.exists()
    known.forget()


def test_the_oldest_leave_for_the_latest(path: Path) -> None:
    known = IneffectiveRestores(path)
    many = [replace(IDENTITY, model=str(number)) for number in range(70)]
    for one in many:
        known.add("chat", one)
    assert [one in known for one in many] == [False] * 6 + [True] * 64


@pytest.mark.parametrize(
    "harm",
    [
        lambda text: text[:-5],
        lambda text: text.replace(":", ";"),
        lambda text: text + " " * 70_000,
        lambda _: "[]",
        lambda _: '{"a": 1}',
        lambda _: "[" * 30_000,
        lambda _: "\udcff",
        lambda _: "",
    ],
    ids=["cut", "altered", "too large", "another", "of another kind", "deep", "no text", "empty"],
)
def test_what_cannot_be_read_says_nothing_and_is_written_anew(path: Path, harm: object) -> None:
    known = IneffectiveRestores(path)
    known.add("chat", IDENTITY)
    assert callable(harm)
    path.write_bytes(harm(path.read_text()).encode("utf-8", "surrogateescape"))
    assert IDENTITY not in known
    known.add("chat", OTHER)
    assert OTHER in known
