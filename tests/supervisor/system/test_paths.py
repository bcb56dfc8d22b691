import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.errors import AccessDenied
from supervisor.settings.tables import is_model_name
from supervisor.system.paths import (
    Directories,
    check_owner,
    directories,
    directory_problem,
    file_name,
    is_ours,
    make_ours,
    make_private,
    name_of_file,
    shipped_directory,
)


def test_shipped_profiles_and_pins_are_found() -> None:
    assert (shipped_directory("profiles") / "base.toml").is_file()
    assert (shipped_directory("vendor") / "engine.toml").is_file()


def test_corral_variables_win_over_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CORRAL_LOG_DIR", raising=False)
    monkeypatch.setenv("LOGS_DIRECTORY", "/var/log/corral:/var/log/other")
    assert directories().log == Path("/var/log/corral")
    monkeypatch.setenv("CORRAL_LOG_DIR", "~/logs")
    assert directories().log == Path.home() / "logs"


def test_a_user_without_a_home_needs_every_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no entry in /etc/passwd
    for name in ("CONFIG", "CACHE", "DATA", "STATE"):
        monkeypatch.delenv(f"XDG_{name}_HOME", raising=False)
    for kind in ("CONFIG", "DATA", "CACHE", "LOG", "RUNTIME"):
        monkeypatch.setenv(f"CORRAL_{kind}_DIR", f"/srv/{kind}")
    assert directories().data == Path("/srv/DATA")
    monkeypatch.delenv("CORRAL_CACHE_DIR")
    with pytest.raises(AccessDenied) as caught:
        directories()
    assert caught.value.hint == "set HOME or CORRAL_CACHE_DIR to an absolute path"


def test_a_directory_is_made_private(tmp_path: Path) -> None:
    made = make_private(tmp_path / "a" / "b")
    assert made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o755)
    assert make_private(made).stat().st_mode & 0o777 == 0o700


def test_a_file_in_place_of_a_directory_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("x", "utf-8")
    with pytest.raises(AccessDenied, match="cannot use the directory"):
        make_private(tmp_path / "log" / "deep")


def with_runtime(runtime: Path) -> Directories:
    return Directories(Path("/c"), Path("/d"), Path("/e"), Path("/l"), runtime)


def test_a_socket_path_that_is_too_long_is_none() -> None:
    runtime = Path("/run/corral")
    assert with_runtime(runtime).engine_socket("chat.0") == runtime / "chat.0.sock"
    assert with_runtime(Path("/run") / ("x" * 100)).engine_socket("chat.0") is None


def test_sockets_of_long_names_are_short_and_differ() -> None:
    where = with_runtime(Path("/run/user/1000/llama-corral"))
    names = [f"organisation/{'m' * 100}:q4.{number}" for number in range(3)]
    found = [where.engine_socket(name) for name in names]
    assert len(set(found)) == len(names)
    assert all(path and len(os.fsencode(path)) <= 103 for path in found)
    assert where.engine_socket("qwen/tiny:q4.0~2") == where.runtime / "qwen%2Ftiny:q4.0~2.sock"


PLAIN = ["chat", "chat.0", "chat.0~2", "Qwen3-0.6B:Q4_K_M@a+b", "a..b", "~"]
HOSTILE = [
    *("", ".", "..", "../x", "a/../b", "/etc/passwd", ".hidden", "a\0b", "a\nb", "a%2Fb", "%", "="),
    *("ключ", "名", "\udc80", "a b", "a\\b", "*", "$(x)", "-x", "x" * 5000, "/" * 300, "é" * 200),
]


@pytest.mark.parametrize("name", [*PLAIN, *HOSTILE, "qwen/tiny:q4"])
def test_any_name_becomes_one_file_in_its_directory(name: str, tmp_path: Path) -> None:
    found = file_name(name)
    path = tmp_path / f"{found}.json"
    path.touch()
    assert list(tmp_path.iterdir()) == [path]
    assert found.isascii()
    assert not found.startswith(".")
    assert name_of_file(found) == (name if 0 < len(name) < 50 else found)


def test_plain_names_keep_their_files() -> None:
    assert [file_name(name) for name in PLAIN] == PLAIN
    assert file_name("qwen/tiny:q4") == "qwen%2Ftiny:q4"


@given(st.lists(st.text(), unique=True, max_size=8), st.sampled_from([34, 60, 200]))
def test_different_names_have_different_files_of_bounded_length(
    names: list[str], max_bytes: int
) -> None:
    found = [file_name(name, max_bytes) for name in names]
    assert len(set(found)) == len(names)
    assert all(len(name) <= max_bytes for name in found)


def test_names_that_differ_behind_the_cut_differ() -> None:
    long = "x" * 300
    assert len({file_name(name) for name in (long, f"{long}a", f"{long}b", file_name(long))}) == 4


def test_the_longest_model_name_is_known_from_its_file() -> None:
    name = f"{'/'.join('abcdefg')}/{'x' * 114}"
    assert is_model_name(name)
    assert name_of_file(file_name(f"{name}.12~3")) == f"{name}.12~3"


def test_without_a_session_the_runtime_directory_is_not_in_tmp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("CORRAL_RUNTIME_DIR", "RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert directories().runtime.is_relative_to(Path.home())


@pytest.mark.parametrize(
    ("mode", "uid", "said"),
    [
        (stat.S_IFDIR | 0o700, 1000, None),
        (stat.S_IFDIR | 0o700, 0, "belongs to another user"),
        (stat.S_IFDIR | 0o700, 65534, "belongs to another user (uid 65534)"),
        (stat.S_IFDIR | 0o750, 1000, "is open to others (mode 750)"),
        (stat.S_IFDIR | 0o1777, 1000, "is open to others"),
        (stat.S_IFLNK | 0o777, 1000, "is not a directory"),
    ],
)
def test_a_directory_is_checked_for_type_owner_and_mode(
    mode: int, uid: int, said: str | None
) -> None:
    found = directory_problem(mode, uid, 1000, 0o077)
    assert (found is None) == (said is None)
    assert (said or "") in (found or "")


@pytest.mark.parametrize("what", ["open", "a file", "missing", "another's"])
def test_a_session_directory_of_another_user_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    what: str,
) -> None:
    for name in ("CORRAL_RUNTIME_DIR", "RUNTIME_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    session = tmp_path / "session"
    if what == "a file":
        session.touch()
    elif what != "missing":
        session.mkdir(mode=0o755 if what == "open" else 0o700)
    if what == "another's":
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
    assert directories().runtime.is_relative_to(Path.home())
    assert "instead of XDG_RUNTIME_DIR" in capsys.readouterr().err


def test_a_private_session_directory_is_used(
    monkeypatch: pytest.MonkeyPatch, runtime: Path
) -> None:
    for name in ("CORRAL_RUNTIME_DIR", "RUNTIME_DIRECTORY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert directories().runtime == runtime / "llama-corral"


def test_a_link_is_refused_as_a_private_directory(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(AccessDenied, match="is not a directory of this user"):
        make_private(tmp_path / "link")
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o755


def test_a_directory_that_all_users_share_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    for make in (make_private, make_ours):
        with pytest.raises(AccessDenied, match="is not a directory of this user"):
            make(tmp_path)
    assert tmp_path.stat().st_mode & 0o7777 == 0o1777


def test_a_directory_that_may_be_shared_for_reading_stays_so(tmp_path: Path) -> None:
    tmp_path.chmod(0o775)
    assert make_ours(tmp_path).stat().st_mode & 0o777 == 0o755


def test_a_directory_that_others_can_write_is_not_ours(tmp_path: Path) -> None:
    directory = make_private(tmp_path / "a")
    assert is_ours(directory)
    directory.chmod(0o720)
    assert not is_ours(directory)
    directory.chmod(0o700)
    tmp_path.chmod(0o777)
    assert not is_ours(directory)
    assert not is_ours(tmp_path / "none")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    directory = make_private(tmp_path / "theirs")
    os.chown(directory, 65534, 65534)
    for make in (make_private, make_ours):
        with pytest.raises(AccessDenied, match="is not a directory of this user"):
            make(directory)
    assert not is_ours(directory)


def test_a_socket_in_a_directory_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_owner(tmp_path)
    check_owner(tmp_path / "none")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(AccessDenied):
        check_owner(tmp_path)
