"""The file with the layers of each worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.errors import AccessDenied
from supervisor.rpc.shards import LayerShares


def test_what_was_written_is_read(tmp_path: Path) -> None:
    shares = LayerShares(tmp_path / "layers")
    assert shares.layers("chat", ["a", "b"], 30) is None
    path = shares.write("chat", {"a": 24, "b": 6}, {"a": 15, "b": 15})
    assert path.stat().st_mode & 0o777 == 0o600
    assert shares.layers("chat", ["b", "a"], 30) == {"a": 24, "b": 6}
    assert shares.layers("chat", ["b", "a"], 30, before=True) == {"a": 15, "b": 15}


def test_a_model_whose_name_has_slashes_has_a_file_in_the_directory(tmp_path: Path) -> None:
    shares = LayerShares(tmp_path / "layers")
    path = shares.write("../tiny:q4", {"a": 24, "b": 6}, {"a": 15, "b": 15})
    assert path.parent == tmp_path / "layers"
    assert shares.layers("../tiny:q4", ["a", "b"], 30) == {"a": 24, "b": 6}


def test_shares_of_other_workers_or_another_file_are_not_used(tmp_path: Path) -> None:
    shares = LayerShares(tmp_path / "layers")
    shares.write("chat", {"a": 24, "b": 6}, {"a": 15, "b": 15})
    assert shares.layers("chat", ["a", "c"], 30) is None
    assert shares.layers("chat", ["a"], 30) is None
    assert shares.layers("chat", ["a", "b"], 31) is None
    assert shares.layers("other", ["a", "b"], 30) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"layers": 3}',
        '{"layers": {"a": 31, "b": -1}}',
        '{"layers": {"a": 29.5, "b": 0.5}}',
        '{"layers": {"a": true, "b": 29}}',
    ],
)
def test_a_file_that_says_something_else_counts_as_missing(tmp_path: Path, text: str) -> None:
    shares = LayerShares(tmp_path / "layers")
    shares.write("chat", {"a": 24, "b": 6}, {"a": 15, "b": 15}).write_text(text)
    assert shares.layers("chat", ["a", "b"], 30) is None


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "layers").write_text("a file")
    with pytest.raises(AccessDenied, match="layers"):
        LayerShares(tmp_path / "layers").write("chat", {"a": 1}, {})
