"""Packages that are hidden from those that would import them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from supervisor.host.hidden_module import hidden


def test_a_hidden_package_is_as_if_not_installed_until_the_block_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    with hidden("colorsys"), pytest.raises(ModuleNotFoundError):
        __import__("colorsys")
    assert __import__("colorsys").ONE_THIRD


def test_a_package_that_is_loaded_stays() -> None:
    with hidden("json"):
        assert __import__("json").dumps


def test_the_log_of_a_daemon_loads_no_rich() -> None:
    code = "import sys, supervisor.log; sys.exit('rich' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
