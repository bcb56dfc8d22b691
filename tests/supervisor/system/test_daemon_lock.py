import os
from dataclasses import replace
from pathlib import Path

import pytest

from supervisor.errors import AccessDenied, DaemonBusy
from supervisor.system.daemon_lock import (
    DaemonInfo,
    lock_runtime_dir,
    read_owner,
    this_daemon,
    write_owner,
)
from supervisor.system.paths import Directories


@pytest.fixture
def where(tmp_path: Path) -> Directories:
    return Directories(*(tmp_path / name for name in ("config", "data", "cache", "log", "run")))


def test_a_second_daemon_is_refused_and_names_the_first(where: Directories) -> None:
    with lock_runtime_dir(where):
        write_owner(where.state_file, DaemonInfo(4711, 1.0, "0.1.0", "http://127.0.0.1:8080"))
        with (
            pytest.raises(DaemonBusy, match=r"pid 4711, http://127\.0\.0\.1:8080"),
            lock_runtime_dir(where),
        ):
            pass
    with lock_runtime_dir(where):
        pass
    assert not where.state_file.exists()


def test_the_files_are_private(where: Directories) -> None:
    with lock_runtime_dir(where):
        write_owner(where.state_file, this_daemon("0.1.0", "http://127.0.0.1:8080"))
        assert where.runtime.stat().st_mode & 0o777 == 0o700
        assert where.state_file.stat().st_mode & 0o777 == 0o600
        assert where.lock_file.stat().st_mode & 0o777 == 0o600


def test_the_files_of_a_killed_daemon_do_not_block_the_next(where: Directories) -> None:
    where.runtime.mkdir(mode=0o700)
    where.lock_file.touch()
    write_owner(where.state_file, DaemonInfo(os.getpid(), 1.0, "0.1.0", "http://127.0.0.1:8080"))
    with lock_runtime_dir(where):
        pass


def test_a_reused_pid_is_not_the_daemon() -> None:
    me = this_daemon("0.1.0", "http://127.0.0.1:8080")
    assert me.is_alive()
    assert not replace(me, created_at=me.created_at - 60).is_alive()
    assert not replace(me, pid=2**22 + 1).is_alive()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '"x"'])
def test_an_invalid_state_file_is_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "daemon.json"
    path.write_text(text, "utf-8")
    assert read_owner(path) is None


def test_a_state_file_round_trips(tmp_path: Path) -> None:
    me = this_daemon("0.1.0", "http://127.0.0.1:8080")
    write_owner(tmp_path / "daemon.json", me)
    assert read_owner(tmp_path / "daemon.json") == me


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious", "utf-8")
    (tmp_path / "daemon.tmp").symlink_to(victim)
    write_owner(tmp_path / "daemon.json", this_daemon("0.1.0", "http://127.0.0.1:8080"))
    assert victim.read_text("utf-8") == "precious"


def test_a_runtime_directory_that_is_a_link_is_refused(where: Directories, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    where.runtime.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AccessDenied, match="not a directory of this user"), lock_runtime_dir(where):
        pass
