from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.installed_engines import install

from supervisor.builds.installed import find_build, installed_builds, is_build_name
from supervisor.errors import EngineBroken, EngineMissing


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "bin" / "llama-server"
    path.parent.mkdir()
    path.touch()
    return path


@pytest.fixture
def engines(tmp_path: Path) -> Path:
    return tmp_path / "engines"


@pytest.mark.parametrize("name", ["b10434", "b10434-cpu", "b10434-cuda-13.4", "b1-vulkan"])
def test_names_of_builds(name: str) -> None:
    assert is_build_name(name)


@pytest.mark.parametrize(
    "name", ["", "b", "10434", "b10434-", "b1/../x", "./b10434", "b1-CPU", ".b1", "b1-a b", "llama"]
)
def test_other_names(name: str) -> None:
    assert not is_build_name(name)


def test_a_build_is_found_by_its_name(engines: Path, program: Path) -> None:
    for name in ("b9000-cpu", "b10434-vulkan", "b10434-cpu"):
        install(engines, name, program)
    (engines / ".scratch").mkdir()
    (engines / "b1-broken").mkdir()
    names = [installed_build.name for installed_build in installed_builds(engines)]
    assert names == ["b10434-cpu", "b10434-vulkan", "b9000-cpu"]
    assert find_build("b9000", engines).name == "b9000-cpu"
    found = find_build("b10434-cpu", engines)
    assert found.path(engines) == engines / "b10434-cpu" / "files" / "llama-server"


def test_a_name_without_a_variant_must_be_clear(engines: Path, program: Path) -> None:
    for name in ("b10434-vulkan", "b10434-cpu"):
        install(engines, name, program)
    with pytest.raises(EngineMissing, match="is installed as b10434-cpu, b10434-vulkan"):
        find_build("b10434", engines)


def test_a_missing_build_is_named_beside_those_here(engines: Path, program: Path) -> None:
    with pytest.raises(EngineMissing, match="b1 is installed") as found:
        find_build("b1", engines)
    assert found.value.hint
    assert "corral engine install" in found.value.hint
    install(engines, "b2-cpu", program)
    with pytest.raises(EngineMissing) as found:
        find_build("b1", engines)
    assert "installed: b2-cpu" in str(found.value.hint)


@pytest.mark.parametrize(
    "change",
    [{"binary": "/bin/sh"}, {"binary": "../../../bin/sh"}, {"name": "b7-cpu"}, {"build": "1"}],
)
def test_a_description_that_leads_elsewhere_is_none(
    engines: Path, program: Path, change: dict[str, object]
) -> None:
    install(engines, "b2-cpu", program)
    path = engines / "b2-cpu" / "engine.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert installed_builds(engines) == ()


def test_no_engine_is_run_from_where_others_write(engines: Path, program: Path) -> None:
    install(engines, "b2-cpu", program)
    engines.chmod(0o770)
    with pytest.raises(EngineBroken, match="open to others") as found:
        find_build("b2", engines)
    assert found.value.hint == f"chmod 750 {engines}"
