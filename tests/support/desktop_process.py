"""`corral serve --desktop` with the pipes of a host, which the test plays."""

import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from support.corral_cli import PATIENCE_S, CorralCli
from support.fork_server import Fork

Line = dict[str, Any]


class DesktopProcess:
    """The host ends when `stdin` is closed, or its holder killed."""

    def __init__(self, corral: CorralCli, *words: str, stdin: int | None = None) -> None:
        ours, theirs = (None, stdin) if stdin is not None else reversed(os.pipe())
        output, their_output = os.pipe()
        self._stdin = ours
        self.output = os.fdopen(output, encoding="utf-8")
        self.process = _start(corral, words, theirs, their_output)
        os.close(their_output)
        if ours is not None:
            os.close(theirs)

    def line(self) -> Line:
        """The next line; fails at the end."""
        text = self.output.readline()
        assert text, "no more lines"
        found: Line = json.loads(text)
        return found

    def until(self, **members: object) -> Line:
        """The next line with these members."""
        while not members.items() <= (line := self.line()).items():
            pass
        return line

    def rest(self) -> list[Line]:
        """All lines to the end."""
        return [json.loads(line) for line in self.output]

    def close_stdin(self) -> None:
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None

    def wait(self) -> int:
        return self.process.wait(PATIENCE_S)

    def end(self) -> None:
        self.close_stdin()
        with suppress(subprocess.TimeoutExpired):
            self.wait()
        self.process.kill()
        self.output.close()


def _start(
    corral: CorralCli, words: tuple[str, ...], stdin: int, stdout: int
) -> subprocess.Popen[bytes] | Fork:
    argv = ["serve", "--desktop", *words]
    if corral.fork_server:
        files = {0: stdin, 1: stdout}
        return corral.fork_server.start(argv, corral.env, corral.root, files)
    return subprocess.Popen(
        corral.argv(*argv),
        env=corral.env,
        cwd=corral.root,
        stdin=stdin,
        stdout=stdout,
        stderr=subprocess.DEVNULL,
    )


def processes_of(root: Path) -> list[psutil.Process]:
    """Daemons and engines that keep something below a directory."""
    return [process for process in psutil.process_iter() if _is_of(process, str(root))]


def _is_of(process: psutil.Process, root: str) -> bool:
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        named = process.environ().get("CORRAL_RUNTIME_DIR", "").startswith(root)
        return named or any(root in word for word in process.cmdline())
    except psutil.Error:
        return False
