from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.samples import GPU, engine, machine, model

from supervisor.errors import SettingsInvalid
from supervisor.plan.profile import load, overlay_flags
from supervisor.plan.tuned_profile import (
    Evidence,
    conditions,
    machine_text,
    path_of,
    read,
    reason_unused,
    warnings,
)

HERE = conditions(machine_text("a processor", machine()), engine(), model())
FILE = f"""
extends = "base"
replicas = 2
[flags]
threads = 3
[tuned]
goal = "latency"
date = "2026-11-22"
result = "1.3 times faster"
machine = "{HERE.machine}"
engine = "{HERE.engine}"
devices = "{HERE.devices}"
model = "{HERE.model}"
"""


def write(directory: Path, text: str, name: str = "chat") -> None:
    (directory / f"{name}.toml").write_text(text)


def test_a_model_without_a_file_is_not_tuned(tmp_path: Path) -> None:
    assert read("chat", tmp_path) is None


def test_a_file_has_the_date_the_goal_and_the_gain(tmp_path: Path) -> None:
    write(tmp_path, FILE)
    found = read("chat", tmp_path)
    assert found
    assert found.summary == "tuned on 2026-11-22 for latency: 1.3 times faster"
    assert (dict(found.flags), found.replicas) == ({"threads": 3}, 2)
    assert reason_unused(found, "base", HERE.machine) is None
    assert list(warnings(found, "base", HERE)) == []


def test_a_file_of_the_users_own_needs_no_evidence(tmp_path: Path) -> None:
    write(tmp_path, "[flags]\nthreads = 3\n")
    found = read("chat", tmp_path)
    assert found
    assert str(tmp_path / "chat.toml") in found.summary
    assert list(warnings(found, "base", HERE)) == []


@pytest.mark.parametrize(
    ("profile", "cores", "said"),
    [("low-latency", 4, "it extends the profile base"), ("base", 2, "another machine")],
)
def test_it_is_not_used_on_another_profile_or_machine(
    tmp_path: Path, profile: str, cores: int, said: str
) -> None:
    write(tmp_path, FILE)
    found = read("chat", tmp_path)
    assert found
    now = replace(HERE, machine=machine_text("a processor", machine(physical_cores=cores)))
    assert said in (reason_unused(found, profile, now.machine) or "")
    (warning,) = warnings(found, profile, now)
    assert "chat.toml is not used" in warning
    assert warning.endswith("; corral tune chat measures again")


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (conditions(HERE.machine, engine("b9500"), model()), "the engine has changed from"),
        (conditions(HERE.machine, engine("b10434", GPU), model()), "the devices have"),
        (
            conditions(HERE.machine, engine(), model(fingerprint="1" * 32)),
            "the model file has changed since",
        ),
    ],
)
def test_it_is_used_with_another_engine_device_or_model_and_says_so(
    tmp_path: Path, now: Evidence, said: str
) -> None:
    write(tmp_path, FILE)
    found = read("chat", tmp_path)
    assert found
    assert reason_unused(found, "base", now.machine) is None
    (warning,) = warnings(found, "base", now)
    assert warning.startswith(said)
    assert warning.endswith("; corral tune chat --check measures whether it still helps")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("flag = 1", "unknown key flag; "),
        ("[flags", "is not TOML"),
        ("flags = 1", "flags is not a table"),
        ("tuned = 1", "tuned is not a table"),
        ("[tuned]\ndate = 2026-11-22", "tuned.date is not a string"),
        ("replicas = true", "replicas is not a number from 1 to 64"),
        ("replicas = 65", "replicas is not a number from 1 to 64"),
        ("extends = 1", "extends is not a string"),
        ('[flags]\nthreads = "\\u0007"', "control character"),
    ],
)
def test_a_broken_file_is_an_error(tmp_path: Path, text: str, said: str) -> None:
    write(tmp_path, text)
    with pytest.raises(SettingsInvalid) as caught:
        read("chat", tmp_path)
    assert said.removesuffix("; ") in caught.value.message
    assert "corral tune chat --undo" in (caught.value.hint or "")


@pytest.mark.parametrize("name", ["../chat", "a/b", "", ".", "..", ".hidden", "a\0b"])
def test_a_name_never_leads_out_of_the_directory(tmp_path: Path, name: str) -> None:
    path = path_of(name, tmp_path)
    assert path.resolve().parent == tmp_path.resolve()
    assert not path.name.startswith(".")


def test_flags_on_top_win_over_older_spellings_of_the_same_option(tmp_path: Path) -> None:
    write(tmp_path, "[flags]\nthreads = 1\nt = 2\n", "mine")
    found = overlay_flags(load("mine", [tmp_path]), {"threads": 3}, "chat (tuned)")
    assert list(found.flags.items())[-1] == ("threads", 3)
    assert found.origins["threads"] == "chat (tuned)"
