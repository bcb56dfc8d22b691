"""Installing and removing, with a systemctl that records its calls."""

from pathlib import Path
from typing import Any

import pytest
from support.service_facts import facts

from supervisor.errors import AccessDenied, ServiceFailed
from supervisor.service import units
from supervisor.service.units import SERVICE, SOCKET, service_files, service_state, user_paths

# Knows each unit whose file there is, and fails with the text of the file `fail`.
SYSTEMCTL = """#!/bin/sh
echo "$@" >> {root}/calls
[ -e {root}/fail ] && cat {root}/fail >&2 && exit 1
case "$*" in
  *--value) [ -e "{root}/units/$3" ] && echo loaded || echo not-found ;;
  *show*) printf 'LoadState=loaded\\nActiveState=active\\nSubState=running\\nMainPID=7\\n'
          printf 'StatusText=1 of 1 instances ready\\nNRestarts=2\\nResult=success\\n' ;;
esac
"""


class Systemd:
    def __init__(self, root: Path) -> None:
        self._root = root
        self.units = root / "units"
        self.paths = user_paths(self.units)

    def install(self, *, start: bool = True, **settings: Any) -> list[str]:
        files = service_files(facts("user", **settings), self.paths)
        units.install("user", files, self.paths, start=start)
        return self.calls()

    def calls(self) -> list[str]:
        """Return the calls that changed something since the last one."""
        calls = self._root / "calls"
        lines = calls.read_text("utf-8").splitlines()
        calls.unlink()
        words = [line.removeprefix("--user ") for line in lines]
        return [line for line in words if line.split()[0] != "show"]

    def fail(self, reason: str) -> None:
        (self._root / "fail").write_text(reason, "utf-8")


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Systemd:
    program = tmp_path / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(SYSTEMCTL.format(root=tmp_path), "utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return Systemd(tmp_path)


def test_a_service_is_written_enabled_and_started(systemd: Systemd) -> None:
    assert systemd.install() == [
        "daemon-reload",
        f"enable {SOCKET} {SERVICE}",
        f"start {SOCKET}",
        f"restart {SERVICE}",
    ]
    unit = systemd.units / SERVICE
    assert unit.stat().st_mode & 0o777 == 0o644


def test_what_did_not_change_is_not_restarted(systemd: Systemd) -> None:
    systemd.install()
    assert systemd.install()[-1] == f"start {SERVICE}"


def test_another_limit_restarts_the_service_and_its_socket_stays(systemd: Systemd) -> None:
    systemd.install()
    calls = systemd.install(supervisor={"drain_timeout_s": 9})
    assert calls[-1] == f"restart {SERVICE}"
    assert not [call for call in calls if call.startswith("stop")]


def test_another_address_closes_the_old_socket_first(systemd: Systemd) -> None:
    systemd.install()
    calls = systemd.install(proxy={"listen": "127.0.0.1:9999"})
    assert calls[:2] == [f"stop {SOCKET}", f"stop {SERVICE}"]
    assert calls[-1] == f"restart {SERVICE}"


def test_a_socket_that_is_not_wanted_any_more_is_removed(systemd: Systemd) -> None:
    systemd.install()
    calls = systemd.install(proxy={"listen": "localhost:8080"})
    assert f"disable {SOCKET}" in calls
    assert not (systemd.units / SOCKET).exists()


def test_nothing_starts_without_start(systemd: Systemd) -> None:
    assert systemd.install(start=False) == ["daemon-reload", f"enable {SOCKET} {SERVICE}"]


def test_uninstalling_stops_the_socket_first_and_leaves_nothing(systemd: Systemd) -> None:
    systemd.install()
    assert units.uninstall("user", systemd.paths) == systemd.paths
    assert systemd.calls() == [
        f"stop {SOCKET}",
        f"stop {SERVICE}",
        f"disable {SERVICE}",
        f"disable {SOCKET}",
        "daemon-reload",
    ]
    assert list(systemd.units.iterdir()) == []
    assert units.uninstall("user", systemd.paths) == ()


def test_a_file_of_the_users_own_is_left_alone(systemd: Systemd) -> None:
    own = systemd.units / SERVICE
    own.parent.mkdir()
    own.write_text("[Service]\nExecStart=/mine\n", "utf-8")
    with pytest.raises(ServiceFailed, match="was not written by"):
        systemd.install()
    with pytest.raises(ServiceFailed, match="was not written by"):
        units.uninstall("user", systemd.paths)
    assert "/mine" in own.read_text("utf-8")


def test_without_systemd_nothing_is_written(
    systemd: Systemd, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServiceFailed, match="systemd is not installed"):
        systemd.install()
    assert not systemd.units.exists()


def test_what_systemd_says_is_shown_with_where_to_look(systemd: Systemd) -> None:
    systemd.fail("Failed to connect to bus: No medium found")
    with pytest.raises(ServiceFailed, match="connect to bus") as failure:
        systemd.install()
    assert "does not run here" in (failure.value.hint or "")
    assert not systemd.units.exists()
    systemd.fail("Job for llama-corral.service failed")
    with pytest.raises(ServiceFailed) as failure:
        systemd.install()
    assert "journalctl --user -u llama-corral" in (failure.value.hint or "")


def test_a_directory_that_is_a_file_is_named(systemd: Systemd) -> None:
    systemd.units.write_text("", "utf-8")
    with pytest.raises(AccessDenied, match="cannot write"):
        systemd.install()


def test_the_state_is_that_of_systemd(systemd: Systemd) -> None:
    state = service_state("user")
    assert (state["is_active"], state["pid"], state["restarts"]) == (True, 7, 2)
    assert state["text"] == "1 of 1 instances ready"
