"""How much of a file the page cache holds."""

import mmap
import os
import sys
from pathlib import Path

import pytest

from supervisor.system.page_cache import held_bytes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mincore as of Linux")
PAGE = mmap.PAGESIZE


def test_pages_that_were_written_are_held(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(100 * PAGE + 1))
    assert held_bytes(file) == 100 * PAGE + 1


def test_pages_of_a_hole_are_not_held(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with file.open("wb") as written:
        written.write(bytes(PAGE))
        written.truncate(4 * PAGE)
    if os.statvfs(tmp_path).f_bsize > PAGE:
        pytest.skip("the file system caches larger blocks")
    assert held_bytes(file) == PAGE


def test_nothing_is_known_of_an_empty_or_a_missing_file_or_one_of_others(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    assert held_bytes(tmp_path / "empty") is None
    assert held_bytes(tmp_path / "missing") is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)
        (tmp_path / "empty").write_bytes(bytes(PAGE))
        assert held_bytes(tmp_path / "empty") is None
