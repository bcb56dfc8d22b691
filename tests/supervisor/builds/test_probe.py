from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.builds.probe import environment, probe
from supervisor.errors import EngineBroken

ENGINE = Path("/bin/llama-server")


def test_libraries_go_before_those_of_the_environment() -> None:
    environ = {"LD_LIBRARY_PATH": "/cuda", "HOME": "/h", "LLAMA_ARG_PORT": "1"}
    assert environment(environ, ENGINE, [Path("/a"), Path("/b")]) == {
        "LD_LIBRARY_PATH": "/a:/b:/cuda",
        "HOME": "/h",
    }


def test_without_libraries_the_path_is_unchanged() -> None:
    assert environment({"HOME": "/h"}, ENGINE, []) == {"HOME": "/h"}


def test_a_probe_has_a_time_limit(tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    engine.write_text("#!/bin/sh\nexec tail -f /dev/null\n")
    engine.chmod(0o755)
    with pytest.raises(EngineBroken, match="--help did not finish"):
        probe(engine, [], cache_dir=tmp_path, limit_s=0.1)


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        (
            "x: error while loading shared libraries: libgomp.so.1: cannot open shared object file",
            "on Debian and Ubuntu the package libgomp1",
        ),
        (
            "x: error while loading shared libraries: libodd.so.7: cannot open shared object file",
            "install this library, or add",
        ),
        (
            "x: /lib/libc.so.6: version `GLIBC_2.38' not found (required by libllama.so)",
            "needs GLIBC 2.38",
        ),
    ],
)
def test_a_library_that_is_missing_or_old_is_told(tmp_path: Path, said: str, hint: str) -> None:
    engine = tmp_path / "engine"
    engine.write_text(f"#!/bin/sh\ncat >&2 <<'EOF'\n{said}\nEOF\nexit 1\n")
    engine.chmod(0o755)
    with pytest.raises(EngineBroken) as found:
        probe(engine, [], cache_dir=tmp_path, limit_s=10)
    assert hint in str(found.value.hint)
