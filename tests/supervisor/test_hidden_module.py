"""Packages that are hidden from their importers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from supervisor.cli.serve import DAEMON
from supervisor.log import hide_module


def test_a_hidden_package_is_as_if_not_installed_until_the_block_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with hide_module("colorsys"), pytest.raises(ModuleNotFoundError):
        __import__("colorsys")
    assert __import__("colorsys").ONE_THIRD


def test_a_package_that_is_loaded_stays() -> None:
    with hide_module("json"):
        assert __import__("json").dumps


def test_a_daemon_that_start_runs_loads_no_command_line_and_nothing_for_consoles() -> None:
    modules = "supervisor.cli.serve, supervisor.daemon.daemon, supervisor.log"
    code = f"import sys, {modules}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert DAEMON[-1] in loaded
    consoles = {"colorama", "greenlet", "rich", "supervisor.cli.app", "typer"}
    unused = {*consoles, "gguf", "httpx", "numpy"}
    assert not loaded & unused


def test_a_daemon_imports_no_file_of_its_working_directory(tmp_path: Path) -> None:
    for name in ("supervisor", "proxy", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a stranger')", "utf-8")
    argv = [sys.executable, *DAEMON, "--help"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "a stranger" not in done.stderr
    assert "--report-fd" in done.stdout + done.stderr
