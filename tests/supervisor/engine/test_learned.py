"""Learned prompts: few private files."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from supervisor.engine.prompts import LearnedPrompts, save_and_emit


def body(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": text}]}


def texts(learned: LearnedPrompts, model: str = "chat") -> list[str]:
    return [prompt.body["messages"][0]["content"] for prompt in learned.prompts(model)]


@pytest.fixture
def learned(tmp_path: Path) -> LearnedPrompts:
    return LearnedPrompts(tmp_path / "prompts")


def age(root: Path) -> None:
    """Make all files older than the next one."""
    for path in root.rglob("*.json"):
        found = path.stat()
        os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns - 10**9))


def test_the_latest_comes_first_and_surplus_prompts_are_deleted(
    learned: LearnedPrompts, tmp_path: Path
) -> None:
    for text in ("a", "b", "c", "a", "d", "e"):
        learned.save("chat", body(text))
        age(tmp_path)
    assert texts(learned) == ["e", "d", "a", "c"]
    assert learned.counts() == {"chat": 4}


def test_files_are_private_and_named_by_content_hash(
    learned: LearnedPrompts, tmp_path: Path
) -> None:
    name = learned.save("chat", body("../../etc"))
    path = tmp_path / "prompts" / "chat" / name
    assert [path] == [path for path in tmp_path.rglob("*") if path.is_file()]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {stat.S_IMODE(case.stat().st_mode) for case in (path.parent, path.parent.parent)} == {
        0o700
    }


def test_unreadable_and_partial_files_are_skipped(learned: LearnedPrompts, tmp_path: Path) -> None:
    learned.save("chat", body("a"))
    directory = tmp_path / "prompts" / "chat"
    (directory / "broken.json").write_text("{")
    (directory / "half.tmp").write_text("{")
    assert texts(learned) == ["a"]
    learned.save("chat", body("b"))
    assert not (directory / "half.tmp").exists()


def test_prompts_of_one_model_or_all_are_deleted(learned: LearnedPrompts) -> None:
    for model in ("chat", "code"):
        learned.save(model, body("a"))
    assert learned.forget("..") == 0
    assert learned.forget("chat") == 1
    assert learned.counts() == {"code": 1}
    assert (learned.forget(), learned.counts()) == (1, {})


async def test_a_disk_error_is_reported_but_not_raised(tmp_path: Path) -> None:
    (tmp_path / "prompts").write_text("no directory")
    emitted: list[tuple[str, Mapping[str, object]]] = []

    def emit(name: str, /, **fields: object) -> None:
        emitted.append((name, fields))

    await save_and_emit(LearnedPrompts(tmp_path / "prompts"), "chat", body("a"), 300, emit)
    assert [name for name, _ in emitted] == ["prompt.store_failed"]
    await save_and_emit(LearnedPrompts(tmp_path / "others"), "chat", body("a"), 300, emit)
    assert emitted[-1][1]["tokens"] == 300


def test_prompts_of_names_with_slashes_are_counted_and_forgotten(
    learned: LearnedPrompts, tmp_path: Path
) -> None:
    for model in ("qwen/tiny:q4", "qwen", "../x"):
        learned.save(model, body(model))
    assert learned.counts() == {"qwen/tiny:q4": 1, "qwen": 1, "../x": 1}
    assert texts(learned, "qwen/tiny:q4") == ["qwen/tiny:q4"]
    assert learned.forget("qwen/tiny:q4") == 1
    assert learned.counts() == {"qwen": 1, "../x": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["prompts"]
