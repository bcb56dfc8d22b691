"""Failed starts: exit codes and messages."""

import socket
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from support.corral_cli import CorralCli


@dataclass(frozen=True)
class Fault:
    """Something wrong with a start.

    Attributes:
        said: The pieces of text that stderr must contain.
        exit_code: The exit code of the command.
        settings: corral.toml; MODEL stands for the path of a good one, HOME for ours.
    """

    said: tuple[str, ...]
    exit_code: int
    settings: str = '[models.m]\npath = "MODEL"\n'
    env: dict[str, str] = field(default_factory=dict)


FAULTS = {
    "missing model": Fault(
        ("m.0", "gone.gguf", "hint:"), 78, '[models.m]\npath = "HOME/gone.gguf"\n'
    ),
    "truncated model": Fault(("cut.gguf", "hint:"), 78, '[models.m]\npath = "HOME/cut.gguf"\n'),
    "text file": Fault(("text.gguf", "GGUF"), 78, '[models.m]\npath = "HOME/text.gguf"\n'),
    "unknown flag": Fault(
        ("ctx-sise", "ctx-size"), 78, '[models.m]\npath = "MODEL"\nflags = { ctx-sise = 1 }\n'
    ),
    "bad value": Fault(
        ("ctx-size", "number"), 78, '[models.m]\npath = "MODEL"\nflags = { ctx-size = "many" }\n'
    ),
    "bad choice": Fault(
        ("cache-type-k", "q8_0"),
        78,
        '[models.m]\npath = "MODEL"\nflags = { cache-type-k = "q3" }\n',
    ),
    "unknown flag past our checks": Fault(
        ("--frobnicate", "log:"), 1, '[models.m]\npath = "MODEL"\nargs = ["--frobnicate"]\n'
    ),
    "unknown profile": Fault(
        ("low-latncy", "low-latency"), 78, '[models.m]\npath = "MODEL"\nprofile = "low-latncy"\n'
    ),
    "unknown setting": Fault(("replica", "replicas"), 78, '[models.m]\npath="MODEL"\nreplica=1\n'),
    "port in use": Fault(
        ("in use", "listen"),
        1,
        '[models.m]\npath = "MODEL"\n[proxy]\nlisten = "127.0.0.1:PORT"\n',
    ),
    "engine missing": Fault(
        ("nowhere/llama-server",),
        78,
        'engine = "HOME/nowhere/llama-server"\n[models.m]\npath = "MODEL"\n',
    ),
    "engine not executable": Fault(
        ("text.gguf", "chmod +x"), 78, 'engine = "HOME/text.gguf"\n[models.m]\npath = "MODEL"\n'
    ),
    "log directory in the way": Fault(
        ("text.gguf/log",), 1, env={"CORRAL_LOG_DIR": "HOME/text.gguf/log"}
    ),
}


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize("name", FAULTS)
def test_a_failed_start_reports_its_reason_and_leaves_nothing_behind(
    corral: CorralCli, tiny_model: Path, taken_port: int, name: str
) -> None:
    fault = FAULTS[name]
    (corral.root / "cut.gguf").write_bytes(tiny_model.read_bytes()[:-1000])
    (corral.root / "text.gguf").write_text("hello, this is no model\n", "utf-8")
    words = {"MODEL": str(tiny_model), "HOME": str(corral.root), "PORT": str(taken_port)}

    def filled(text: str) -> str:
        for word, value in words.items():
            text = text.replace(word, value)
        return text

    corral.configure(filled(fault.settings))
    corral.env |= {key: filled(value) for key, value in fault.env.items()}
    corral("engine", "path")  # so that the results of a first run are cached
    failed = corral("start")

    assert failed.returncode == fault.exit_code, failed.stderr
    assert failed.stderr.startswith("error: ")
    for piece in fault.said:
        assert piece in failed.stderr
    assert "Traceback" not in failed.stderr
    assert corral("status").returncode == 3
    assert corral.engines() == []


def test_a_runtime_directory_too_long_for_a_socket_is_rejected(corral: CorralCli) -> None:
    corral.env["CORRAL_RUNTIME_DIR"] = str(corral.root / ("x" * 90))
    failed = corral("status")
    assert failed.returncode == 1
    assert "too long for a socket" in failed.stderr
    assert "CORRAL_RUNTIME_DIR" in failed.stderr
