"""Learned prompts are kept in files of their own, few of them, for this user alone."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from supervisor.warmup.learned import LearnedPrompts, save_and_emit


def body(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": text}]}


def texts(learned: LearnedPrompts, model: str = "chat") -> list[str]:
    return [prompt.body["messages"][0]["content"] for prompt in learned.prompts(model)]


@pytest.fixture
def learned(tmp_path: Path) -> LearnedPrompts:
    return LearnedPrompts(tmp_path / "prompts")


def age(root: Path) -> None:
    """Make everything older, so that what comes next is newer by the clock of files."""
    for path in root.rglob("*.json"):
        found = path.stat()
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns - 10**9))


def test_the_one_used_last_comes_first_and_what_is_too_much_leaves(
    learned: LearnedPrompts, tmp_path: Path
) -> None:
    for text in ("a", "b", "c", "a", "d", "e"):
        learned.save("chat", body(text))
        age(tmp_path)
    assert texts(learned) == ["e", "d", "a", "c"]
    assert learned.counts() == {"chat": 4}


def test_files_are_private_and_named_after_what_is_in_them(
    learned: LearnedPrompts, tmp_path: Path
) -> None:
    name = learned.save("chat", body("../../etc"))
    path = tmp_path / "prompts" / "chat" / name
    assert [path] == [one for one in tmp_path.rglob("*") if one.is_file()]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {stat.S_IMODE(one.stat().st_mode) for one in (path.parent, path.parent.parent)} == {
        0o700
    }


def test_what_cannot_be_read_and_what_was_left_half_written_is_passed_over(
    learned: LearnedPrompts, tmp_path: Path
) -> None:
    learned.save("chat", body("a"))
    directory = tmp_path / "prompts" / "chat"
    (directory / "broken.json").write_text("{")
    (directory / "half.tmp").write_text("{")
    assert texts(learned) == ["a"]
    learned.save("chat", body("b"))
    assert not (directory / "half.tmp").exists()


def test_those_of_one_model_or_of_all_are_forgotten(learned: LearnedPrompts) -> None:
    for model in ("chat", "code"):
        learned.save(model, body("a"))
    assert learned.forget("..") == 0
    assert learned.forget("chat") == 1
    assert learned.counts() == {"code": 1}
    assert (learned.forget(), learned.counts()) == (1, {})


async def test_a_disk_that_refuses_is_told_and_fails_nothing(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("no directory")
    told: list[tuple[str, Mapping[str, object]]] = []

    def emit(name: str, /, **fields: object) -> None:
        told.append((name, fields))

    await save_and_emit(LearnedPrompts(tmp_path / "prompts"), "chat", body("a"), 300, emit)
    assert [name for name, _ in told] == ["prompt.store_failed"]
    await save_and_emit(LearnedPrompts(tmp_path / "others"), "chat", body("a"), 300, emit)
    assert told[-1][1]["tokens"] == 300
