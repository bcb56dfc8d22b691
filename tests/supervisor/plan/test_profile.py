from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.errors import SettingsInvalid
from supervisor.plan.profile import load, names
from supervisor.system.paths import shipped_directory

SHIPPED = shipped_directory("profiles")


def write(directory: Path, name: str, text: str) -> None:
    directory.mkdir(exist_ok=True)
    (directory / f"{name}.toml").write_text(text)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return tmp_path / "own"


def test_the_shipped_profiles_are_listed() -> None:
    assert names([SHIPPED]) == (
        "base",
        "high-throughput",
        "low-latency",
        "low-memory",
        "speculative",
    )


@pytest.mark.parametrize("name", names([SHIPPED]))
def test_every_shipped_profile_has_a_description(name: str) -> None:
    found = load(name, [SHIPPED])
    assert found.description
    assert found.flags.keys() == found.origins.keys()


def test_a_profile_inherits_and_overrides(own: Path) -> None:
    write(own, "mine", 'extends = "base"\n[flags]\nparallel = 9\n')
    found = load("mine", [own, SHIPPED])
    assert (found.flags["parallel"], found.origins["parallel"]) == (9, "mine")
    assert (found.flags["flash-attn"], found.origins["flash-attn"]) == ("on", "base")


def test_a_users_profile_replaces_ours_and_may_extend_it(own: Path) -> None:
    write(own, "base", 'extends = "base"\n[flags]\nparallel = 9\n')
    found = load("base", [own, SHIPPED])
    assert found.path.parent == own
    assert (found.flags["parallel"], found.flags["flash-attn"]) == (9, "on")


def test_a_circular_chain_is_rejected(own: Path) -> None:
    write(own, "a", 'extends = "b"')
    write(own, "b", 'extends = "a"')
    with pytest.raises(SettingsInvalid, match="a extends b extends a"):
        load("a", [own])


@pytest.mark.parametrize("name", ["low-latencyy", "../profiles/base", "/etc/passwd", ""])
def test_a_missing_profile_is_rejected_with_the_available_ones(name: str) -> None:
    with pytest.raises(SettingsInvalid, match="not found") as caught:
        load(name, [SHIPPED])
    assert "speculative" in (caught.value.hint or "")


def test_the_nearest_profile_is_suggested() -> None:
    with pytest.raises(SettingsInvalid, match="did you mean low-latency"):
        load("low-latencyy", [SHIPPED])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("flag = 1", "unknown key flag"),
        ("[flags", "is not TOML"),
        ("flags = 1", "flags is not a table"),
        ("extends = 1", "extends is not a string"),
        ("[flags]\nx = [1]", r"flags\.x is not a string"),
    ],
)
def test_an_invalid_file_is_rejected_with_the_key(own: Path, text: str, said: str) -> None:
    write(own, "wrong", text)
    with pytest.raises(SettingsInvalid, match=said) as caught:
        load("wrong", [own])
    assert "wrong.toml" in caught.value.message


def test_the_nearest_key_is_suggested(own: Path) -> None:
    write(own, "wrong", "[flag]")
    with pytest.raises(SettingsInvalid) as caught:
        load("wrong", [own])
    assert caught.value.hint == "did you mean flags?"
