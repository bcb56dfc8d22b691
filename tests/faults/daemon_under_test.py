"""A daemon on a real engine, for one fault."""

from __future__ import annotations

import http.client
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
from support import tiny_gguf
from support.corral_cli import PATIENCE_S, CorralCli, begin_stream, until
from support.engine_scripts import library_exports

from supervisor.builds.discover import Engine
from supervisor.daemon.control_client import Client
from supervisor.daemon.control_messages import InstanceStatus
from supervisor.errors import CorralError

FAKE: Final = Path(__file__).parent.parent / "support" / "llama_server.py"
STREAM_TOKENS: Final = 30_000


@dataclass(frozen=True)
class Models:
    """The models of the tests (`slow` generates for a minute) and the real llama-server."""

    tiny: Path
    slow: Path
    engine: Engine

    @classmethod
    def make(cls, directory: Path, engine: Engine) -> Models:
        """Write the models into a directory."""
        slow = tiny_gguf.make_slow(directory / "slow.gguf")
        return cls(tiny_gguf.make(directory / "tiny.gguf"), slow, engine)


@dataclass
class DaemonUnderTest:
    """A daemon, its command line, and the models that it may serve."""

    corral: CorralCli
    models: Models

    @property
    def root(self) -> Path:
        """The directory of its settings, logs, sockets and data."""
        return self.corral.root

    @property
    def client(self) -> Client:
        return self.corral.client

    def serve(self, models: Mapping[str, Path], before: str = "", after: str = "") -> None:
        """Start models in the background, and return when they are ready.

        Args:
            models: Name → file.
            before: Text at the head of corral.toml.
            after: Text for the last model's table.
        """
        self.configure(models, before, after)
        self.corral.ok("start")

    def configure(self, models: Mapping[str, Path], before: str = "", after: str = "") -> None:
        """Write corral.toml."""
        tables = [f'[models.{name}]\npath = "{path}"\n' for name, path in models.items()]
        self.corral.configure("\n".join([before, *tables, after]))

    def instance(self, name: str) -> InstanceStatus:
        return self.corral.instances()[name]

    def pid(self, name: str) -> int:
        pid = self.instance(name).pid
        assert pid is not None, f"{name} has no process"
        return pid

    def ready_again(self, name: str, before: int, within_s: float = PATIENCE_S) -> str:
        """Wait until an instance serves with another process."""

        def is_back() -> bool:
            now = self.instance(name)
            return now.state == "ready" and now.pid != before

        until(is_back, within_s=within_s)
        return "ready again"

    def state_of(self, name: str, state: str, within_s: float = PATIENCE_S) -> str:
        """Wait for an instance's state; return it with the code of its error."""
        until(lambda: self.instance(name).state == state, within_s=within_s)
        error = self.instance(name).error
        return f"{state}: {error['code']}" if error else state

    def stream(self, model: str) -> http.client.HTTPResponse:
        return begin_stream(self.corral, STREAM_TOKENS, model)

    def ask(self, model: str) -> str:
        """Request a short response; return `answered`, or how it failed."""
        try:
            begin_stream(self.corral, 4, model).read()
        except (OSError, http.client.HTTPException, CorralError) as error:
            return f"{type(error).__name__}: {error}"
        return "answered"

    def events(self, name: str) -> list[dict[str, Any]]:
        return self.corral.events(name)

    def write_engine(self, script: str) -> Path:
        """Write an engine that answers --help as the real one and otherwise runs a script.

        Args:
            script: Shell; `$ENGINE` is the real engine, `$FAKE` the fake one with the address.
        """
        path = self.root / "llama-server"
        engine = self.models.engine
        path.write_text(
            "#!/bin/sh\n"
            + library_exports(engine.path, engine.library_dirs)
            + f"ENGINE={engine.path}\n"
            'case "$*" in *--help* | *--version* | *--list-devices*) exec $ENGINE "$@" ;; esac\n'
            "for word; do case $before in --host) host=$word ;; --port) port=$word ;; esac\n"
            "before=$word; done\n"
            f'FAKE="{sys.executable} {FAKE} --host $host --port ${{port:-0}}"\n'
            f"{script}\n",
            "utf-8",
        )
        path.chmod(0o700)
        return path


def ending(stream: http.client.HTTPResponse) -> str:
    """Read a stream to its end; return how it ends."""
    try:
        rest = stream.read()
    except http.client.IncompleteRead as broken:
        rest = broken.partial
    except OSError as error:
        return f"{type(error).__name__}"
    last = rest.strip().rpartition(b"\n")[2]
    if last.startswith(b'data: {"error"'):
        return "ends in an error event"
    return "ends with [DONE]" if last == b"data: [DONE]" else "cut"


def gone(pid: int, within_s: float = PATIENCE_S) -> str:
    until(lambda: not is_alive(pid), within_s=within_s)
    return "gone"


def is_alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill(pid: int) -> None:
    psutil.Process(pid).send_signal(signal.SIGKILL)
