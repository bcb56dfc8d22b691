"""Starts the server of a test: the engine with a local model, or llama-corral.

llama-corral is a fork of a process that has imported it: most tests start a server.
"""

from __future__ import annotations

import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import tomlkit
from support.fork_server import Fork, ForkServer

from supervisor.builds.discover import Engine
from supervisor.builds.probe import library_path
from supervisor.plan.setting import ENGINE_TOOLS, reserved_reason

# The model for a part of a hub's name.
MODELS: Final = {"stories": "tiny.gguf", "bert": "bert.gguf", "jina": "rank.gguf"}
_ANY: Final = "tiny.gguf"
_SOURCES: Final = frozenset({"model", "model-url", "hf-repo", "hf-file"})
# The models of router mode, as if these were in the cache of a hub.
ROUTER_MODELS: Final = (
    "ggml-org/tinygemma3-GGUF:Q8_0",
    "ggml-org/test-model-stories260K:F32",
    "ggml-org/test-model-stories260K-infill:F32",
)
# llama-corral sets these itself, or has other settings for them.
_NOT_PASSED: Final = frozenset(
    (
        *("host", "port", "alias", "api-key", "offline", "metrics", "slots", "ui"),
        *("cors-origins", "slot-save-path", "tags"),
        *("models-dir", "models-preset", "models-max", "models-autoload"),
    )
)


class OptionRefused(RuntimeError):
    """llama-corral serves no model with this option, so a test need not wait for it."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """Options of llama-server by their long names; a switch is True, or False after `--no-`."""

    options: dict[str, str | bool] = field(default_factory=dict)

    @classmethod
    def read(cls, words: Sequence[str], engine: Engine) -> CommandLine:
        found: dict[str, str | bool] = {}
        left = iter(words)
        for word in left:
            flag = engine.flags.find(word)
            key = flag.key if flag else word.lstrip("-")
            if flag and flag.kind != "switch":
                value = next(left, "")
                found[key] = str(Path(value).absolute()) if flag.kind == "path" else value
            else:
                found[key] = not word.startswith(("--no-", "-no-"))
        return cls(found)

    def text(self, key: str, default: str = "") -> str:
        return str(self.options.get(key, default))

    @property
    def is_router(self) -> bool:
        """Whether it names no model: llama-server is a router then."""
        return not self.options.keys() & _SOURCES

    def flags(self) -> dict[str, str | bool]:
        """The options that a model of llama-corral gets.

        Raises:
            OptionRefused: It has a forbidden option.
        """
        found = {
            key: value for key, value in self.options.items() if key not in _NOT_PASSED | _SOURCES
        }
        for key in found:
            if reason := reserved_reason(key, runs_tools=True):
                raise OptionRefused(f"llama-corral refuses --{key}: {reason}")
        return found

    def model(self, directory: Path) -> Path | None:
        """The local model; None if it names none, or a model without a substitute."""
        if given := self.options.get("model"):
            return Path(str(given))
        hub = " ".join(str(self.options.get(key, "")) for key in sorted(_SOURCES))
        return next((directory / file for part, file in MODELS.items() if part in hub), None)


@dataclass(frozen=True, slots=True)
class StandIn:
    """Starts servers in place of llama-server.

    Attributes:
        engine: The engine.
        directory: Has the models that replace those of a hub, and gets the files of llama-corral.
        forks: Runs llama-corral; None runs the engine alone.
    """

    engine: Engine
    directory: Path
    forks: ForkServer | None

    def start(self, words: Sequence[str], env: Mapping[str, str]) -> Server:
        """Start a server with llama-server's command line, without the program.

        Raises:
            FileNotFoundError: No local model replaces the model that it names.
            OptionRefused: llama-corral refuses one of its options.
        """
        line = CommandLine.read(words, self.engine)
        if line.is_router:
            models = dict.fromkeys(ROUTER_MODELS, self.directory / _ANY)
        elif model := line.model(self.directory):
            models = {"": model}
        else:
            raise FileNotFoundError(f"no model replaces that of {' '.join(words)}")
        if self.forks is None:
            return self._start_engine(words, line, models, env)
        return self._start_corral(self.forks, line, models, env)

    def _start_engine(
        self,
        words: Sequence[str],
        line: CommandLine,
        models: Mapping[str, Path],
        env: Mapping[str, str],
    ) -> Server:
        argv = [*self.engine.command, *_without_sources(words)]
        if not line.is_router:
            argv += ["--model", str(models[""])]
        elif "models-preset" not in line.options:
            preset = self.directory / "router.ini"
            sections = (f"[{name}]\nmodel = {path}\n" for name, path in models.items())
            preset.write_text("\n".join(sections), "utf-8")
            argv += ["--models-preset", str(preset)]
        libraries = library_path(env, self.engine.path, self.engine.library_dirs)
        # With AIP_MODE it listens on this port, not on that of --port.
        port = {"AIP_HTTP_PORT": line.text("port", "8080")}
        return subprocess.Popen(argv, env={**env, **libraries, **port})

    def _start_corral(
        self,
        forks: ForkServer,
        line: CommandLine,
        models: Mapping[str, Path],
        env: Mapping[str, str],
    ) -> Server:
        own = Path(tempfile.mkdtemp(prefix="c", dir=self.directory))
        config = own / "corral.toml"
        config.write_text(tomlkit.dumps(settings(line, models, own)), "utf-8")
        names = ("CONFIG", "LOG", "RUNTIME", "DATA")
        places = {f"CORRAL_{name}_DIR": str(own / name.lower()) for name in names}
        fork = forks.start(["serve", "--config", str(config)], {**env, **places}, own, {1: 1, 2: 2})
        return _Forked(fork)


class Server(Protocol):
    """The part of `subprocess.Popen` that the tests use."""

    pid: int

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class _Forked:
    def __init__(self, fork: Fork) -> None:
        self._fork = fork
        self.pid = fork.pid
        self.poll, self.wait, self.kill = fork.poll, fork.wait, fork.kill

    @property
    def returncode(self) -> int | None:
        return self._fork.returncode

    def terminate(self) -> None:
        self._fork.send_signal(signal.SIGTERM)


def _without_sources(words: Sequence[str]) -> list[str]:
    kept: list[str] = []
    left = iter(words)
    for word in left:
        if word.lstrip("-") in _SOURCES:
            next(left, None)
        elif word != "--offline":
            kept.append(word)
    return kept


def settings(line: CommandLine, models: Mapping[str, Path], directory: Path) -> dict[str, object]:
    """The settings for a command line; writes a file of keys if it has a key.

    Args:
        models: By name; the name of the only model of a server that is no router is empty.
    """
    proxy = {"listen": f"127.0.0.1:{line.text('port', '8080')}"}
    if key := line.text("api-key"):
        keys = directory / "keys.toml"
        keys.touch(0o600)
        keys.write_text(tomlkit.dumps({"keys": {"tests": {"key": key, "tools": True}}}), "utf-8")
        proxy["api_keys_file"] = str(keys)
    flags = line.flags()
    own = {"flags": flags, **({} if ENGINE_TOOLS.isdisjoint(flags) else {"engine_tools": True})}
    if line.is_router:
        tables = {
            name: {"path": str(path), **own, "preload": False} for name, path in models.items()
        }
    else:
        # llama-server with one model takes any name for it.
        alias, *aliases = [*line.text("alias", "default").split(","), "*"]
        tables = {alias: {"path": str(models[""]), "aliases": aliases, **own}}
    return {
        "proxy": proxy,
        "supervisor": {
            "adaptive": False,
            "measure_threads": False,
            "persist_slots": False,
            "record_requests": False,
        },
        "models": tables,
    }
