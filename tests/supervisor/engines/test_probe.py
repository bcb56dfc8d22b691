from __future__ import annotations

from pathlib import Path

import pytest

from supervisor.engines.probe import environment, probe
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
