"""The daemon under attack: its own process, in its own directories."""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from fuzz.served import KEYS, SETTINGS
from support import tiny_gguf
from support.corral_cli import CorralCli, until

from supervisor.daemon.control_client import Client
from supervisor.errors import CorralError


@dataclass
class Daemon:
    """A daemon in the foreground, its stderr in a file.

    Attributes:
        home: Its directories; a short path, because socket paths must be.
        files_max: Its soft and hard limit of open files; None keeps ours.
    """

    home: Path
    files_max: int | None = None
    corral: CorralCli = field(init=False)
    _process: subprocess.Popen[bytes] | None = None
    _read: int = 0

    def __post_init__(self) -> None:
        self.corral = CorralCli(self.home)
        slow = tiny_gguf.make_slow(self.home / "slow.gguf")
        self.settings = SETTINGS.format(slow=slow, tiny=tiny_gguf.make(self.home / "tiny.gguf"))
        self.corral.configure(self.settings)
        self.api_keys_file.touch(0o600)
        self.restore_files()

    def restore_files(self) -> None:
        self.settings_file.write_text(self.settings, "utf-8")
        self.api_keys_file.write_text(KEYS, "utf-8")

    @property
    def settings_file(self) -> Path:
        return self.home / "config" / "corral.toml"

    @property
    def api_keys_file(self) -> Path:
        return self.home / "config" / "keys.toml"

    def start(self) -> None:
        limit = self.files_max
        self.restore_files()

        def limited() -> None:
            if limit is not None:
                resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.corral.argv("serve"),
                env=self.corral.env,
                cwd=self.home,
                stdout=log,
                stderr=log,
                preexec_fn=limited,  # noqa: PLW1509 (no thread of ours holds a lock here)
            )
        pid = self._process.pid
        until(lambda: self._is_owner(pid) or not self.is_alive())
        self.corral.ok("start", "m", "embed")

    def _is_owner(self, pid: int) -> bool:
        with contextlib.suppress(AssertionError):
            return self.corral.daemon_pid == pid
        return False

    @property
    def log(self) -> Path:
        return self.home / "daemon.stderr"

    def hang_up(self) -> None:
        if self._process and self.is_alive():
            self._process.send_signal(signal.SIGHUP)

    @property
    def pid(self) -> int:
        assert self._process
        return self._process.pid

    @property
    def client(self) -> Client:
        return Client(self.home / "run" / "control.sock")

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.client.status().url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def exit_code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll() if self._process else None

    def news(self) -> Iterator[dict[str, Any] | str]:
        """Yield its output since the last call: events, and text between them."""
        with self.log.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        yield from read_log(whole.decode("utf-8", "replace"))

    def settle(self, within_s: float = 60) -> str:
        """Wait until no slot is busy; return the slots that still are, as text."""
        until_s = time.monotonic() + within_s
        busy = "the daemon does not tell"
        while time.monotonic() < until_s and busy:
            with contextlib.suppress(CorralError):
                models = self.client.status().models
                slots = {
                    instance.name: instance.slots_busy for m in models for instance in m.instances
                }
                busy = ", ".join(f"{name}: {count}" for name, count in slots.items() if count)
            time.sleep(0.1)
        return busy

    def stop(self) -> int | None:
        """Stop it with SIGTERM and return its exit code."""
        if self.is_alive():
            self.corral("stop")
            with contextlib.suppress(subprocess.TimeoutExpired):
                assert self._process
                self._process.wait(20)
        code = self.exit_code()
        self.end()
        return code

    def restart(self) -> None:
        self.end()
        self.start()

    def end(self) -> None:
        if self._process and self.is_alive():
            self._process.kill()
            self._process.wait()
        for engine in self.corral.engines():
            with contextlib.suppress(psutil.Error):
                engine.kill()


def read_log(text: str) -> Iterator[dict[str, Any] | str]:
    """Yield the events of a log, and the text between them, such as a traceback."""
    between: list[str] = []
    for line in text.splitlines():
        if line.startswith("{"):
            if between:
                yield "\n".join(between)
            between = []
            yield json.loads(line)
        else:
            between.append(line)
    if between:
        yield "\n".join(between)
