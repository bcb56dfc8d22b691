"""Drives llama-corral by its command line, with everything it keeps under one directory."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from support.fork_server import Fork, ForkServer

from supervisor.builds.discover import CPU_LIBRARY_ENV
from supervisor.daemon.control_client import Client
from supervisor.daemon.control_messages import DaemonStatus, InstanceStatus
from supervisor.engine.launch import PROCESS_TAG_ENV
from supervisor.errors import CorralError
from supervisor.system.daemon_lock import DaemonInfo, read_owner

# What tests wait for comes at once, or much later where other programs have the processor: a wait
# that runs out says only that nothing comes at all.
PATIENCE_S = 120

Daemon = subprocess.Popen[bytes] | Fork


@dataclass
class CorralCli:
    """The command line and its daemon.

    With a fork server, commands and daemons are forks of it and not new Python processes.
    """

    root: Path
    fork_server: ForkServer | None = None
    measure_threads: bool = False
    adaptive: bool = False
    env: dict[str, str] = field(init=False)
    _daemons: list[Daemon] = field(default_factory=list)

    def __post_init__(self) -> None:
        names = {"config": "config", "log": "log", "runtime": "run", "data": "data"}
        paths = {f"CORRAL_{key.upper()}_DIR": str(self.root / name) for key, name in names.items()}
        inherited = {
            name: value
            for name, value in os.environ.items()
            if "CORRAL" not in name or name == CPU_LIBRARY_ENV
        }
        self.env = {**inherited, **paths, "NO_COLOR": "1"}
        if not self.measure_threads:  # it takes seconds for each new model file
            self.env["CORRAL_SUPERVISOR__MEASURE_THREADS"] = "false"
        if not self.adaptive:  # other tests load the machine, and instances would be replaced
            self.env["CORRAL_SUPERVISOR__ADAPTIVE"] = "false"

    def hide_stored_models(self) -> None:
        """Let commands find no models of the user who runs the tests."""
        stores = ("HF_HUB_CACHE", "LLAMA_CACHE", "OLLAMA_MODELS")
        self.env |= {"HOME": str(self.root), **{name: str(self.root / name) for name in stores}}

    def configure(self, text: str) -> None:
        """Write corral.toml; the proxy listens on any free port unless the text has [proxy]."""
        (self.root / "config").mkdir(exist_ok=True)
        listen = "" if "[proxy]" in text else '[proxy]\nlisten = "127.0.0.1:0"\n'
        (self.root / "config" / "corral.toml").write_text(text + "\n" + listen, "utf-8")

    # Commands

    def __call__(
        self, *words: str, directory: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        directory = directory or self.root
        if self.fork_server:
            return self.fork_server.run(words, self.env, directory)
        return subprocess.run(
            self.argv(*words),
            env=self.env,
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def argv(self, *words: str) -> list[str]:
        """Return the words that run a command in a new Python process."""
        return [sys.executable, "-m", "supervisor.cli", *words]

    def ok(self, *words: str) -> str:
        """Run a command that must work; return its stdout."""
        done = self(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def data(self, *words: str) -> Any:
        """Run a command that must work with --json; return the envelope's data."""
        return json.loads(self.ok(*words, "--json"))["data"]

    # The daemon

    def serve(self, *, until_ready: bool = True, limit: str | None = None) -> Daemon:
        """Run a daemon as a child of the test, behind a shell's `ulimit` with these words."""
        daemon = self._serve_limited(limit) if limit or not self.fork_server else self._serve()
        self._daemons.append(daemon)
        if until_ready:
            # The socket may still be that of a daemon that was killed; the owner is not.
            until(lambda: (owner := self._owner()) and owner.pid == daemon.pid)
            self.ok("start")
        return daemon

    def _serve(self) -> Fork:
        assert self.fork_server
        return self.fork_server.start(["serve"], self.env, self.root, {})

    def _serve_limited(self, limit: str | None) -> subprocess.Popen[bytes]:
        quiet = subprocess.DEVNULL
        argv = self.argv("serve")
        if limit:
            argv = ["sh", "-c", f'ulimit {limit} && exec "$@"', "sh", *argv]
        return subprocess.Popen(argv, env=self.env, cwd=self.root, stdout=quiet, stderr=quiet)

    def kill(self) -> None:
        """Kill the daemon and its engines; return when they have ended."""
        engines = self.engines()
        os.kill(self.daemon_pid, signal.SIGKILL)
        for engine in engines:
            with suppress(psutil.NoSuchProcess):  # it dies with its daemon
                engine.kill()
        until(lambda: not self.engines())

    def end(self) -> None:
        """End everything, and fail if an engine was left behind."""
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()
        if (owner := self._owner()) and owner.is_alive():
            with suppress(ProcessLookupError):
                os.kill(owner.pid, signal.SIGTERM)
            until(lambda: not owner.is_alive())
        until(lambda: not self.engines())

    @property
    def client(self) -> Client:
        """The daemon's control socket, asked without the cost of a command."""
        return Client(Path(self.env["CORRAL_RUNTIME_DIR"]) / "control.sock")

    def status(self) -> DaemonStatus:
        return self.client.status()

    def is_running(self) -> bool:
        try:
            self.status()
        except CorralError:
            return False
        return True

    @property
    def url(self) -> str:
        return self.status().url

    def instances(self) -> Mapping[str, InstanceStatus]:
        """All instances by name."""
        models = self.status().models
        return {instance.name: instance for model in models for instance in model.instances}

    def model_states(self) -> dict[str, str]:
        return {model.name: model.state for model in self.status().models}

    def slots_busy(self) -> int:
        return sum(instance.slots_busy for instance in self.instances().values())

    def events(self, name: str) -> list[dict[str, Any]]:
        """Events of one name in the log of a daemon that `corral start` started."""
        text = (self.root / "log" / "daemon.log").read_text("utf-8")
        complete = text[: text.rfind("\n") + 1]  # the last line may be in the middle of a write
        lines = [json.loads(line) for line in complete.splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == name]

    def engines(self) -> list[psutil.Process]:
        """Engine processes of this daemon, also if about to exit; no zombies."""
        return [process for process, _ in self._engines()]

    def engine_argvs(self) -> list[list[str]]:
        """The command line of each of them: a process may end before it can be asked for it."""
        return [argv for _, argv in self._engines()]

    def _engines(self) -> Iterator[tuple[psutil.Process, list[str]]]:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                argv = process.cmdline()
                if "llama-server" in "".join(argv[:1]) and self._has_started(process):
                    yield process, argv

    def _has_started(self, process: psutil.Process) -> bool:
        """Return whether its daemon or a command has, not a daemon of a nested directory."""
        runtime = Path(process.environ().get(PROCESS_TAG_ENV, "").partition("\n")[0])
        is_zombie = process.status() == psutil.STATUS_ZOMBIE
        return runtime.is_relative_to(self.env["CORRAL_RUNTIME_DIR"]) and not is_zombie

    @property
    def daemon_pid(self) -> int:
        """The process that the state file names."""
        owner = self._owner()
        assert owner
        return owner.pid

    def _owner(self) -> DaemonInfo | None:
        return read_owner(Path(self.env["CORRAL_RUNTIME_DIR"]) / "daemon.json")


def begin_stream(corral: CorralCli, tokens: int, model: str = "tiny") -> http.client.HTTPResponse:
    """Begin a streamed chat completion; return it once its first line has arrived."""
    body = {
        "model": model,
        "stream": True,
        "max_tokens": tokens,
        "messages": [{"role": "user", "content": "hello"}],
    }
    request = urllib.request.Request(
        f"{corral.url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    response: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=PATIENCE_S)
    response.readline()
    return response


def rest_of(stream: http.client.HTTPResponse) -> str:
    """Read a stream that is broken off, and may be."""
    try:
        return stream.read().decode()
    except http.client.IncompleteRead as error:
        return error.partial.decode()


def until(condition: Callable[[], object], *, within_s: float = PATIENCE_S) -> float:
    """Wait until a condition holds that another process brings about; return how long that took.

    Polls, as a process that has ended or a slot that is free sends a test no event: every 10 ms at
    first, later every 50 ms, and for at most a third of the time, because a check that runs a
    command keeps a processor from the awaited process.
    """
    began_at_s = time.monotonic()
    while True:
        checked_at_s = time.monotonic()
        if condition():
            return time.monotonic() - began_at_s
        now_s = time.monotonic()
        waited_s = now_s - began_at_s
        assert waited_s < within_s, f"not within {within_s} s"
        check_s = min(0.1, now_s - checked_at_s)
        time.sleep(max(0.01, min(0.05, waited_s / 20), 2 * check_s))
