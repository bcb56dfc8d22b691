"""`corral service`, of a user, with a systemctl that agrees to everything."""

from pathlib import Path

import pytest
from support.corral_cli import CorralCli

SYSTEMCTL = """#!/bin/sh
case "$*" in *show*) echo LoadState=loaded; echo ActiveState=inactive; echo SubState=dead ;; esac
"""


@pytest.fixture
def user(corral: CorralCli, tiny_model: Path) -> CorralCli:
    corral.configure(f'[models.tiny]\npath = "{tiny_model}"\n[proxy]\nlisten = "127.0.0.1:9"\n')
    program = corral.root / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(SYSTEMCTL, "utf-8")
    program.chmod(0o755)
    corral.env["PATH"] = f"{program.parent}:{corral.env['PATH']}"
    corral.env["XDG_CONFIG_HOME"] = str(corral.root / "xdg")
    return corral


def units(user: CorralCli) -> dict[str, str]:
    directory = user.root / "xdg" / "systemd" / "user"
    return {path.name: path.read_text("utf-8") for path in directory.glob("*")}


def test_a_service_is_installed_and_removed(user: CorralCli) -> None:
    said = user("service", "install", "--user")
    assert (said.returncode, "enable-linger" in said.stdout) == (0, True), said.stderr
    service = units(user)["llama-corral.service"]
    assert f"--config {user.root}/config/corral.toml" in service
    assert f"CORRAL_DATA_DIR={user.env['CORRAL_DATA_DIR']}" in service
    assert "ListenStream=127.0.0.1:9" in units(user)["llama-corral.socket"]
    assert "CORRAL_SUPERVISOR__ADAPTIVE" in said.stderr  # not for the service
    assert "kept" in user.ok("service", "uninstall", "--user")
    assert units(user) == {}
    assert user.ok("service", "uninstall", "--user") == "not installed\n"


def test_showing_installs_nothing(user: CorralCli) -> None:
    assert "[Service]" in user.ok("service", "show", "--user")
    data = user.data("service", "show", "--user")
    assert [Path(path).name for path in data] == ["llama-corral.service", "llama-corral.socket"]
    assert units(user) == {}


def test_a_service_that_does_not_run_is_told_by_the_exit_code(user: CorralCli) -> None:
    shown = user("service", "status", "--user")
    assert (shown.returncode, "inactive (dead)" in shown.stdout) == (3, True)


def test_a_service_needs_a_settings_file(user: CorralCli) -> None:
    (user.root / "config" / "corral.toml").unlink()
    refused = user("service", "install", "--user")
    assert refused.returncode == 78
    assert units(user) == {}


def test_a_daemon_that_is_no_service_is_in_the_way(user: CorralCli) -> None:
    user.env["CORRAL_PROXY__LISTEN"] = "127.0.0.1:0"
    user.serve()
    refused = user("service", "install", "--user")
    assert (refused.returncode, "corral stop" in refused.stderr) == (69, True)
