from pathlib import Path

import pytest

from supervisor.errors import StateDenied
from supervisor.host.paths import Directories, directories, make_private, shipped


def test_profiles_and_pins_are_found_in_this_copy() -> None:
    assert (shipped("profiles") / "base.toml").is_file()
    assert (shipped("vendor") / "engine.toml").is_file()


def test_our_variables_win_over_the_service_managers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CORRAL_LOG_DIR", raising=False)
    monkeypatch.setenv("LOGS_DIRECTORY", "/var/log/corral:/var/log/other")
    assert directories().log == Path("/var/log/corral")
    monkeypatch.setenv("CORRAL_LOG_DIR", "~/logs")
    assert directories().log == Path.home() / "logs"


def test_a_directory_is_made_private(tmp_path: Path) -> None:
    made = make_private(tmp_path / "a" / "b")
    assert made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o755)
    assert make_private(made).stat().st_mode & 0o777 == 0o700


def test_a_file_in_the_way_is_said(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("x", "utf-8")
    with pytest.raises(StateDenied, match="cannot use the directory"):
        make_private(tmp_path / "log" / "deep")


def test_a_socket_path_that_no_system_could_bind_is_none(tmp_path: Path) -> None:
    def where(runtime: Path) -> Directories:
        return Directories(tmp_path, tmp_path, tmp_path, tmp_path, runtime)

    assert where(Path("/run/corral")).engine_socket("chat.0") == Path("/run/corral/chat.0.sock")
    assert where(Path("/run") / ("x" * 100)).engine_socket("chat.0") is None


def test_without_a_session_the_runtime_directory_is_not_in_tmp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("CORRAL_RUNTIME_DIR", "RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    assert directories().runtime.is_relative_to(Path.home())
