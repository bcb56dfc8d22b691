import os
from pathlib import Path

import pytest
from support import top_samples
from support.samples import machine

from supervisor.diagnose.doctor import check_failed, describe_cores, run_checks
from supervisor.system.paths import Directories


def test_a_user_without_a_home_gets_findings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # no HOME, not in /etc/passwd
    settings = tmp_path / "corral.toml"
    settings.touch()
    assert run_checks(settings, Directories(*(tmp_path / name for name in "abcde")))


def test_an_ordinary_machine_has_cores_and_threads() -> None:
    assert describe_cores(machine()) == "8 cores, 16 threads"


def test_what_is_special_about_the_cores_is_named() -> None:
    here = machine(efficiency_cores=4, quota_spare_cores=2, numa_nodes=2)
    assert describe_cores(here) == (
        "8 cores (4 of them efficiency cores), 16 threads, 2 more cores beyond the CPU quota, "
        "2 NUMA nodes"
    )


def test_an_instance_that_is_not_restarted_any_more_fails() -> None:
    error = {"code": "memory_fault", "message": "it crashed", "hint": "try another", "log": None}
    bad = top_samples.instance("chat.0", state="failed", error=error)
    good = top_samples.instance("chat.1", error=error)  # of the run before
    (found,) = check_failed([top_samples.model("chat", bad, good)])
    assert (found.name, found.level, found.text) == ("instance chat.0", "fail", "it crashed")
    assert found.fix
    assert found.fix.startswith("try another; ")
    assert "`corral start chat`" in found.fix
