from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from supervisor.builds.discover import Engine
from supervisor.errors import EngineBroken, EngineMissing
from supervisor.rpc.worker import WorkerOptions, command, find

ALL = WorkerOptions("127.0.0.1", 50052, 2, "CPU", cache=True, memory_bytes=512 * 1024**2)


def test_the_program_ships_beside_the_engine(engine: Engine) -> None:
    path, options = find(engine)
    assert path.parent == engine.path.parent
    assert {"--host", "--port", "--threads", "--device", "--cache"} <= options


def test_an_option_of_another_build_is_dropped_with_the_reason(engine: Engine) -> None:
    argv, dropped = command(find(engine), ALL)
    assert argv[1:] == (
        *("--host", "127.0.0.1", "--port", "50052", "--threads", "2"),
        *("--device", "CPU", "--cache"),
    )
    assert dropped == ("this build's ggml-rpc-server has no --mem",)


def test_a_build_with_all_options_gets_them() -> None:
    names = {"--host", "--port", "--threads", "--device", "--cache", "--mem"}
    argv, dropped = command((Path("/x/rpc-server"), frozenset(names)), ALL)
    assert argv[-3:] == ("--mem", "512", "--cache")
    assert dropped == ()


def test_an_engine_without_the_program_names_another_that_has_it(
    engine: Engine, tmp_path: Path
) -> None:
    with pytest.raises(EngineMissing, match="no ggml-rpc-server beside it") as caught:
        find(replace(engine, path=tmp_path / "llama-server"))
    assert "GGML_RPC" in str(caught.value.hint)


def test_another_program_of_that_name_is_refused(engine: Engine, tmp_path: Path) -> None:
    program = tmp_path / "ggml-rpc-server"
    program.write_text("#!/bin/sh\necho hello\n", "utf-8")
    program.chmod(0o700)
    with pytest.raises(EngineBroken, match="not that of ggml-rpc-server"):
        find(replace(engine, path=tmp_path / "llama-server"))
