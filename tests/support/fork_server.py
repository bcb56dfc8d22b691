"""Runs `corral` commands in forks of one process that has imported all of llama-corral.

A command that starts Python and imports what it needs costs up to a second of CPU time; a fork
costs some milliseconds. Each command still is a process of its own, with its own environment,
directory, streams and exit code. A daemon that `corral start` starts is a fork as well.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import pkgutil
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, NoReturn, TextIO, cast

import proxy
import supervisor
from supervisor.cli.serve import DAEMON

CLI: Final = "supervisor.cli"
# The words of ours that begin a process, without those of the command.
_STARTS: Final = ((sys.executable, "-m", CLI), (sys.executable, *DAEMON))
# Names the server's socket to commands, so that the daemons they start are forks too.
SOCKET_ENV: Final = "FORK_SERVER"
# They import huggingface_hub, which reads the environment while it is imported.
_FRESH: Final = frozenset(
    {"supervisor.models.hub", "supervisor.models.transfer", "supervisor.cli.hub_model"}
)
_MESSAGE_MAX_BYTES: Final = 128 * 1024
_DESCRIPTORS_MAX: Final = 8
_FIRST_FREE_DESCRIPTOR: Final = 100


class Fork:
    """One command, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.pid: int = json.loads(connection.recv(64))
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                status = self._connection.recv(64)
            except TimeoutError:
                raise subprocess.TimeoutExpired("corral", timeout or 0.0) from None
            self._connection.close()
            self.returncode = json.loads(status)
        return self.returncode

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired, BlockingIOError):
            self.wait(0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The process that forks, and a directory for its socket."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="f")
        self.socket_path = str(Path(self._directory.name) / "socket")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.fork_server", self.socket_path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert self._process.stdout
        assert self._process.stdout.read(1), "the fork server did not start"

    def run(
        self, words: Sequence[str], env: Mapping[str, str], cwd: Path
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            files = {1: out.fileno(), 2: err.fileno()}
            code = self.start(words, env, cwd, files).wait()
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode())
        return subprocess.CompletedProcess(list(words), code, *texts)

    def start(
        self,
        words: Sequence[str],
        env: Mapping[str, str],
        cwd: Path,
        files: Mapping[int, int],
        *,
        new_session: bool = False,
    ) -> Fork:
        """Start a command; `files` are descriptors of the command → ours, others are closed.

        In a new session, a terminal at its stdin becomes the controlling one.
        """
        env = {**env, SOCKET_ENV: self.socket_path}
        return _ask_for_fork(self.socket_path, words, env, cwd, files, new_session=new_session)

    def close(self) -> None:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._directory.cleanup()


def _ask_for_fork(
    path: str,
    words: Sequence[str],
    env: Mapping[str, str],
    cwd: Path,
    files: Mapping[int, int],
    *,
    module: str = CLI,
    new_session: bool = False,
) -> Fork:
    request = {
        "module": module,
        "words": list(words),
        "env": dict(env),
        "cwd": str(cwd),
        "targets": list(files),
        "new_session": new_session,
    }
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(path)
    socket.send_fds(connection, [json.dumps(request).encode()], list(files.values()))
    return Fork(connection)


# The server's side


def main(path: str) -> None:
    """Serve requests until stdin is closed."""
    for package in (supervisor, proxy):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name not in _FRESH:
                importlib.import_module(module.name)
    for name in ("aiohttp", "httpx", "rich.console", "rich.table", "uvloop", "structlog"):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen(64)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.write(1, b"1")
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ, lambda: _accept(listener, selector))
        selector.register(0, selectors.EVENT_READ, sys.exit)
        while True:
            for key, _ in selector.select():
                key.data()


def _accept(listener: socket.socket, selector: selectors.BaseSelector) -> None:
    connection, _ = listener.accept()
    data, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_MAX_BYTES, _DESCRIPTORS_MAX)
    request = json.loads(data)
    pid = os.fork()
    if pid == 0:
        _run_command(request, descriptors, connection)
    for descriptor in descriptors:
        os.close(descriptor)
    end = os.pidfd_open(pid)

    def report() -> None:
        selector.unregister(end)
        os.close(end)
        _, status = os.waitpid(pid, 0)
        with suppress(OSError), connection:
            connection.send(json.dumps(os.waitstatus_to_exitcode(status)).encode())

    selector.register(end, selectors.EVENT_READ, report)


def _run_command(
    request: Mapping[str, Any], descriptors: Sequence[int], connection: socket.socket
) -> NoReturn:
    """Become the command that a request describes; send its pid when it can take signals."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        connection.send(json.dumps(os.getpid()).encode())
        if request["new_session"]:
            os.setsid()
        _take_files(dict(zip(request["targets"], descriptors, strict=True)))
        if request["new_session"] and os.isatty(0):
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        sys.stdin, sys.stdout, sys.stderr = (_stream(number) for number in range(3))
        sys.argv = ["corral", *request["words"]]
        # click derives the name of the completion variable from the package, if there is one.
        sys.modules["__main__"].__package__ = ""
        subprocess.Popen = cast("Any", _Popen)  # type: ignore[misc]  # for the rest of this process
        code = _exit_code(request["module"])
    except BaseException:  # noqa: BLE001 (as the interpreter would, at the end of a process)
        traceback.print_exc()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _exit_code(module: str) -> int:
    """Run the `main` of a module, as the interpreter does."""
    try:
        code = importlib.import_module(module).main()
    except SystemExit as end:
        code = end.code
    return code if isinstance(code, int) else int(code is not None)


def _take_files(files: Mapping[int, int]) -> None:
    """Have these descriptors (target → ours) and nothing else open; 0 to 2 are /dev/null if not."""
    null = os.open(os.devnull, os.O_RDWR)
    wanted = {**dict.fromkeys(range(3), null), **files}
    # Out of the way of every target first.
    high = {
        target: os.dup2(ours, _FIRST_FREE_DESCRIPTOR + number)
        for number, (target, ours) in enumerate(wanted.items())
    }
    for target, ours in high.items():
        os.dup2(ours, target)
    kept = sorted(wanted)
    for before, after in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(before + 1, after)


def _stream(number: int) -> TextIO:
    errors = "backslashreplace" if number == 2 else "strict"
    return open(number, "r" if number == 0 else "w", encoding="utf-8", errors=errors)


class _Popen(subprocess.Popen):  # type: ignore[type-arg]
    """Starts programs, except that a daemon of `corral start` becomes another fork."""

    def __new__(cls, argv: Sequence[str], **options: Any) -> Any:
        ours = next((start for start in _STARTS if tuple(argv[: len(start)]) == start), None)
        if ours is None:
            return super().__new__(cls)
        null = os.open(os.devnull, os.O_RDWR)
        files: dict[int, int] = {number: number for number in options["pass_fds"]}
        for number, name in enumerate(("stdin", "stdout", "stderr")):
            file = options.get(name)
            files[number] = null if file == subprocess.DEVNULL else number if file is None else file
        return _ask_for_fork(
            os.environ[SOCKET_ENV],
            argv[len(ours) :],
            os.environ,
            Path(options.get("cwd") or Path.cwd()),
            files,
            module=ours[-1],
            new_session=options["start_new_session"],
        )


if __name__ == "__main__":
    main(sys.argv[1])
