"""A llama-corral with a home of its own, driven as a person drives it: by its command line."""

import http.client
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from supervisor.host.lock import DaemonInfo, read_owner

PATIENCE_S = 60


@dataclass
class Corral:
    """The command line, with everything it keeps under one directory."""

    home: Path
    env: dict[str, str] = field(init=False)
    _daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        kept = {name: str(self.home / name) for name in ("config", "log", "run", "data")}
        ours = {f"CORRAL_{name.upper()}_DIR": path for name, path in kept.items()}
        ours["CORRAL_RUNTIME_DIR"] = ours.pop("CORRAL_RUN_DIR")
        clean = {name: value for name, value in os.environ.items() if "CORRAL" not in name}
        self.env = {**clean, **ours, "NO_COLOR": "1"}

    def configure(self, text: str) -> None:
        """Write corral.toml; clients connect to any free port unless the text says another."""
        (self.home / "config").mkdir(exist_ok=True)
        listen = "" if "[proxy]" in text else '[proxy]\nlisten = "127.0.0.1:0"\n'
        (self.home / "config" / "corral.toml").write_text(text + "\n" + listen, "utf-8")

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        return self.within(self.home, *words)

    def within(self, directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a directory to its end."""
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
        return [sys.executable, "-m", "supervisor.cli", *words]

    def serve(
        self, *, until_ready: bool = True, limit: str | None = None
    ) -> subprocess.Popen[bytes]:
        """Run a daemon as a child of the test, behind a shell's `ulimit` with these words."""
        quiet = subprocess.DEVNULL
        argv = self.argv("serve")
        if limit:
            argv = ["sh", "-c", f'ulimit {limit} && exec "$@"', "sh", *argv]
        daemon = subprocess.Popen(argv, env=self.env, cwd=self.home, stdout=quiet, stderr=quiet)
        self._daemons.append(daemon)
        if until_ready:
            # The socket may still be that of a daemon that was killed; the owner is not.
            until(lambda: (owner := self._owner()) and owner.pid == daemon.pid)
            self.ok("start")
        return daemon

    def end(self) -> None:
        """End everything, and fail if an engine was left behind."""
        for daemon in self._daemons:
            daemon.kill()
            daemon.wait()
        self("stop")
        until(lambda: not self.engines())

    def ok(self, *words: str) -> str:
        """Run a command that must work; return its stdout."""
        done = self(*words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def data(self, *words: str) -> Any:
        """Run a command that must work with --json; return the envelope's data."""
        return json.loads(self.ok(*words, "--json"))["data"]

    @property
    def url(self) -> str:
        url: str = self.data("status")["url"]
        return url

    def engines(self) -> list[psutil.Process]:
        """Return the engines that run for this home, the dying included, zombies not."""
        return [process for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            line = process.cmdline()
            alive = process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False
        ours = any(str(self.home) in word for word in line)
        return alive and ours and "llama-server" in line[0]

    @property
    def daemon_pid(self) -> int:
        """Return the number of the daemon that the state file names."""
        owner = self._owner()
        assert owner
        return owner.pid

    def _owner(self) -> DaemonInfo | None:
        return read_owner(self.home / "run" / "daemon.json")


def begin_stream(corral: Corral, tokens: int, model: str = "tiny") -> http.client.HTTPResponse:
    """Begin a streamed answer and return it once its first bytes are there."""
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


def until(condition: Callable[[], object], *, within_s: float = PATIENCE_S) -> float:
    """Wait for another process to bring a condition about; return how long that took.

    Looks every 10 ms: what is waited for (a process gone, a slot free) has no event that a test
    could hear. This is the one place that does.
    """
    began_at_s = time.monotonic()
    while not condition():
        took_s = time.monotonic() - began_at_s
        assert took_s < within_s, f"not within {within_s} s"
        time.sleep(0.01)
    return time.monotonic() - began_at_s
