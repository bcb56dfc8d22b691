import errno
import os
import resource
import socket
import threading
from pathlib import Path

import pytest

from supervisor.diagnose.host_checks import (
    Finding,
    check_address,
    check_directories,
    check_directory,
    check_files,
    check_leftovers,
    check_memlock,
    check_slots_directory,
)
from supervisor.system.daemon_lock import DaemonInfo, this_daemon, write_owner
from supervisor.system.machine import Machine
from supervisor.system.paths import Directories

GIB = 1 << 30


@pytest.fixture
def where(tmp_path: Path) -> Directories:
    return Directories(*(tmp_path / name for name in ("config", "data", "cache", "log", "run")))


def machine(memlock_bytes: int | None) -> Machine:
    return Machine(2, 2, 8 * GIB, 4 * GIB, memlock_bytes, may_renice=True, cpu_flags=frozenset())


@pytest.mark.parametrize(
    ("limit", "level"),
    [(resource.RLIM_INFINITY, "ok"), (4096, "ok"), (512, "warn"), (64, "fail")],
)
def test_the_limit_of_open_files_is_compared_with_engines_and_clients(
    monkeypatch: pytest.MonkeyPatch, limit: int, level: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    finding = check_files(instances=2)
    assert finding.level == level
    assert (finding.fix is None) is (level == "ok")


@pytest.mark.parametrize(
    ("allowed", "wanted", "level"),
    [(None, GIB, "ok"), (GIB, GIB, "ok"), (1024, 0, "ok"), (1024, GIB, "warn")],
)
def test_the_limit_of_locked_memory_is_compared_with_the_models(
    allowed: int | None, wanted: int, level: str
) -> None:
    assert check_memlock(machine(allowed), wanted).level == level


def test_an_address_in_use_by_others_fails_and_our_own_does_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        assert check_address(taken, None).level == "fail"
        assert check_address(taken, f"http://{taken}").level == "ok"
    assert check_address(taken, None).level == "ok"
    assert check_address("[::1]:0", None).name == "address"


def test_missing_directories_are_fine(where: Directories) -> None:
    assert {check_directory.level for check_directory in check_directories(where)} == {"ok"}
    assert not where.runtime.exists()


def test_a_private_directory_that_is_open_to_others_gets_a_warning(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    finding = check_directory("log", tmp_path, is_private=True)
    assert (finding.level, finding.fix) == ("warn", f"chmod 700 {tmp_path}")
    assert check_directory("data", tmp_path, is_private=False).level == "ok"
    tmp_path.chmod(0o700)
    assert check_directory("log", tmp_path, is_private=True).level == "ok"


def test_a_link_in_place_of_a_private_directory_fails(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert check_directory("log", tmp_path / "link", is_private=True).level == "fail"
    assert check_directory("data", tmp_path / "link", is_private=False).level == "ok"


@pytest.mark.parametrize("place", ["file", "file/below"])
def test_a_file_in_place_of_a_directory_fails(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("x")
    assert check_directory("data", tmp_path / place, is_private=False).level == "fail"


def test_a_directory_that_cannot_be_written_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may always
    assert check_directory("data", tmp_path, is_private=False).level == "fail"
    assert check_directory("data", tmp_path / "new", is_private=False).level == "fail"


def test_a_directory_of_another_user_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    assert check_directory("runtime", tmp_path, is_private=True).level == "fail"


def test_files_of_a_killed_daemon_get_a_warning(where: Directories) -> None:
    assert check_leftovers(where, is_running=False).text == "none"
    where.runtime.mkdir()
    (where.runtime / "chat.0.sock").touch()
    write_owner(where.state_file, DaemonInfo(os.getpid(), 1.0, "1", "http://x"))
    finding = check_leftovers(where, is_running=False)
    assert finding.level == "warn"
    assert "daemon.json, chat.0.sock" in finding.text


def test_a_daemon_that_hangs_fails(where: Directories) -> None:
    where.runtime.mkdir()
    write_owner(where.state_file, this_daemon("1", "http://x"))
    assert check_leftovers(where, is_running=False).level == "fail"
    assert check_leftovers(where, is_running=True).level == "ok"


def test_a_shared_directory_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_slots_directory(tmp_path / "new").level == "ok"
    assert check_slots_directory(tmp_path) == Finding("slots_directory", "ok", str(tmp_path))
    assert not list(tmp_path.iterdir())

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    finding = check_slots_directory(tmp_path)
    assert (finding.level, finding.text) == (
        "fail",
        f"cannot write in {tmp_path}: No space left on device",
    )


def test_a_shared_directory_whose_parent_is_missing_may_lack_its_mount(tmp_path: Path) -> None:
    finding = check_slots_directory(tmp_path / "mnt" / "slots")
    assert finding.level == "warn"
    assert "and its parent directory do not exist" in finding.text
    assert finding.fix is not None
    assert finding.fix.startswith("mount the file system")


def test_a_shared_directory_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kept" / "chat").mkdir(parents=True)
    assert check_slots_directory(tmp_path).level == "ok"
    (tmp_path / "kept" / "chat" / "1.json").touch()
    assert check_slots_directory(tmp_path).level == "ok"

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "open", fail)
    finding = check_slots_directory(tmp_path)
    text = f"cannot read in {tmp_path}: Input/output error"
    assert (finding.level, finding.text) == ("fail", text)


def test_a_shared_directory_that_hangs_does_not_hang_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda _: may_end.wait())
    finding = check_slots_directory(tmp_path, 0.01)
    may_end.set()
    assert finding.level == "fail"
    assert "has not answered for" in finding.text
