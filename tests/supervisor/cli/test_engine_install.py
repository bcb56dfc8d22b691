from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.engine_program import engine_program
from support.release_server import ReleaseServer, engine_archive

from supervisor.builds.installed import lock_builds, read_in_use
from supervisor.builds.variant import Target
from supervisor.cli import engine
from supervisor.cli.engine import install, list_engines, rollback, update, use
from supervisor.errors import EngineBroken, EngineMissing, EnginesBusy


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ReleaseServer]:
    for name in ("CONFIG", "DATA", "CACHE", "LOG", "RUNTIME"):
        monkeypatch.setenv(f"CORRAL_{name}_DIR", str(tmp_path / name.lower()))
    monkeypatch.setattr(engine, "this_machine", lambda: Target("ubuntu", "x64"))
    with ReleaseServer().serving() as server:
        for build in (11200, 11100):
            file = f"llama-b{build}-bin-ubuntu-{{}}x64.tar.gz"
            archive = engine_archive(f"b{build}", engine_program(build))
            names = [file.format(variant) for variant in ("", "vulkan-")]
            server.releases[f"b{build}"] = dict.fromkeys(names, archive)
        server.stable = ("v0.5.0", "b11100")
        monkeypatch.setenv("CORRAL_RELEASES__API", server.api)
        yield server


@pytest.fixture
def engines(tmp_path: Path) -> Path:
    return tmp_path / "data" / "engines"


def test_an_installed_build_waits_to_be_used(server: ReleaseServer, engines: Path) -> None:
    assert (
        install("stable", None, None).text == "installed b11100-cpu (corral engine use b11100-cpu)"
    )
    assert read_in_use(engines).current is None
    again = install("b11100", None, None)
    assert again.text == "already installed: b11100-cpu (corral engine use b11100-cpu)"
    assert len(server.ranges) == 2  # nightly-tag.txt, and the archive once
    use("b11100", None)
    assert install("b11100", None, None).text == "already installed: b11100-cpu (in use)"


def test_the_first_engine_of_a_machine_is_used_at_once(
    server: ReleaseServer, engines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("supervisor.builds.discover.engine_pins", lambda _: ())
    monkeypatch.setattr("supervisor.builds.discover.shutil.which", lambda *_, **__: None)
    assert install("newest", None, None).text == "installed b11200-cpu (in use)"
    assert "b11200-cpu" in list_engines(None).text


def test_a_variant_without_its_device_is_told(server: ReleaseServer) -> None:
    (note,) = install("newest", "vulkan", None).notes
    assert note.startswith("b11200-vulkan runs, but lists no device")


def test_an_update_keeps_the_variant_and_the_build_before(
    server: ReleaseServer, engines: Path
) -> None:
    install("stable", "vulkan", None)
    use("b11100", None)
    assert update("newest", None).text == "in use: b11200-vulkan, was b11100-vulkan"
    assert update("stable", None).text == "b11200-vulkan is up to date"
    assert rollback(None).text == "in use: b11100-vulkan"
    assert {path.name for path in engines.glob("b*")} == {"b11100-vulkan", "b11200-vulkan"}


def test_an_update_without_an_installed_build_installs_one(
    server: ReleaseServer, engines: Path
) -> None:
    update("stable", None)
    assert read_in_use(engines).current == "b11100-cpu"


def test_other_words_are_no_builds(server: ReleaseServer) -> None:
    for word in ("11100", "latest", "../b11100", "v1"):
        with pytest.raises(EngineMissing, match="no build of llama.cpp is named"):  # noqa: RUF043
            install(word, None, None)
    assert server.requests == []


def test_a_setting_that_wins_is_told(
    server: ReleaseServer, engines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("stable", None, None)
    monkeypatch.setenv("CORRAL_ENGINE", "/opt/llama-server")
    assert use("b11100", None).notes == ("the setting engine = /opt/llama-server takes precedence",)


def test_a_build_that_was_damaged_since_is_told(server: ReleaseServer, engines: Path) -> None:
    for wanted in ("stable", "newest"):
        install(wanted, None, None)
        use("b11100" if wanted == "stable" else "b11200", None)
    (engines / "b11100-cpu" / "files" / "llama-server").write_text("#!/bin/sh\nexit 1\n")
    (note,) = rollback(None).notes
    assert "it does not run" in note
    with pytest.raises(EngineBroken):
        use("b11100", None)


def test_one_command_changes_builds_at_a_time(server: ReleaseServer, engines: Path) -> None:
    with lock_builds(engines), pytest.raises(EnginesBusy):
        install("stable", None, None)
