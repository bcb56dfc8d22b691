"""The files that requests are recorded in."""

import os
import stat
from pathlib import Path

import pytest

from supervisor.records.request_sizes import RecordedRequest, RecordFiles


def request(prompt_tokens: int = 40) -> RecordedRequest:
    return RecordedRequest(
        kind="chat",
        conversation=5,
        prompt_tokens=prompt_tokens,
        cached_tokens=30,
        generated_tokens=7,
        after_any_s=-0.5,
        after_own_s=None,
        duration_s=1.5,
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "requests"


@pytest.fixture
def files(root: Path) -> RecordFiles:
    return RecordFiles(root)


def test_what_was_appended_is_read_in_order(files: RecordFiles) -> None:
    files.append("chat", [request(1), request(2)])
    files.append("chat", [request(3)])
    files.append("a.1", [request(4)])
    assert files.requests("chat") == [request(1), request(2), request(3)]
    assert files.counts() == {"a.1": 1, "chat": 3}


def test_files_are_for_this_user_alone(files: RecordFiles, root: Path) -> None:
    os.umask(0o022)
    files.append("chat", [request()])
    found = [root, *root.rglob("*")]
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in found}
    assert modes == {"requests": 0o700, "chat": 0o700, "requests.jsonl": 0o600}


def test_a_full_file_replaces_the_older_one(root: Path) -> None:
    files = RecordFiles(root, file_bytes=2 * len(request().line))
    for number in range(10, 17):
        files.append("chat", [request(number)])
    assert files.requests("chat") == [request(14), request(15), request(16)]
    assert len(list(root.rglob("*.jsonl"))) == 2


def test_a_line_that_was_cut_off_costs_no_other(files: RecordFiles, root: Path) -> None:
    files.append("chat", [request(1)])
    path = root / "chat" / "requests.jsonl"
    path.write_bytes(path.read_bytes() + request(2).line[:20])
    files.append("chat", [request(3)])
    assert files.requests("chat") == [request(1), request(3)]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[" * 100_000,
        b"\xff",
        request().line.replace(b"40", b"-1"),
        request().line.replace(b"40", b"1e999"),
        request().line.replace(b"1.5", b"NaN"),
        request().line.replace(b'"chat"', b'"\\u001b[2J"'),
        request().line.replace(b'"kind"', b'"text"'),
    ],
)
def test_an_invalid_line_is_skipped(line: bytes) -> None:
    assert RecordedRequest.read(request().line) == request()
    assert RecordedRequest.read(line) is None


def test_what_is_forgotten_is_gone(files: RecordFiles, root: Path) -> None:
    files.append("chat", [request()])
    files.append("other", [request(), request()])
    assert files.forget("chat") == {"chat": 1}
    assert files.requests("chat") == []
    assert files.forget() == {"other": 2}
    assert list(root.iterdir()) == []
    files.append("chat", [request()])
    assert files.counts() == {"chat": 1}


def test_a_link_is_not_followed(files: RecordFiles, root: Path, tmp_path: Path) -> None:
    files.append("chat", [request()])
    (root / "chat" / "requests.jsonl").unlink()
    (tmp_path / "target").write_text("mine")
    (root / "chat" / "requests.jsonl").symlink_to(tmp_path / "target")
    with pytest.raises(OSError, match="symbolic links"):
        files.append("chat", [request()])
    assert (tmp_path / "target").read_text() == "mine"


def test_without_a_record_there_is_nothing(files: RecordFiles) -> None:
    assert files.requests("chat") == []
    assert files.counts() == files.forget() == {}


def test_a_model_whose_name_has_slashes_is_recorded_and_forgotten(
    files: RecordFiles, root: Path
) -> None:
    for model in ("qwen/tiny:q4", "../x", "qwen"):
        files.append(model, [request()])
    assert files.counts() == {"qwen/tiny:q4": 1, "../x": 1, "qwen": 1}
    assert files.forget("qwen/tiny:q4") == {"qwen/tiny:q4": 1}
    assert files.requests("qwen/tiny:q4") == []
    assert sorted(path.name for path in root.iterdir()) == ["%2E.%2Fx", "qwen"]
