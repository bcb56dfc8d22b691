"""Install the service under a real systemd, and check its behaviour.

systemd runs as the first process of a container whose root is an overlay of this system's, so
nothing is changed here; the network is shared. Exits with 1 if something is not as it should be.
"""

from __future__ import annotations

import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support import tiny_gguf  # noqa: E402 (found by the line above, as those after it)
from support.corral_cli import until  # noqa: E402
from support.steady_client import SteadyClient  # noqa: E402

UNIT: Final = "llama-corral"
CORRAL: Final = str(Path(sys.executable).parent / "corral")
SETTINGS_FILE: Final = "/etc/llama-corral/corral.toml"
SETTINGS: Final = """
[models.tiny]
path = "/srv/models/tiny.gguf"
[proxy]
listen = "127.0.0.1:{port}"
api_keys_file = "keys.toml"
[supervisor]
measure_threads = false
slots_key_file = "slots.key"
adaptive = false
"""
WATCHDOG: Final = "[Service]\nWatchdogSec=3\n"
RESTARTS: Final = 3
NEXT: Final = "99.0.0"  # the version of the upgrade
KEPT: Final = tuple(f"/{path}/llama-corral" for path in ("etc", "var/lib", "var/cache", "var/log"))


class Container:
    """A running systemd, and the directory that is its root."""

    def __init__(self, root: Path, leader: int) -> None:
        self.root = root
        self._leader = leader

    def try_(self, *argv: str) -> subprocess.CompletedProcess[str]:
        command = ["nsenter", "-t", str(self._leader), "-a", "env", "HOME=/root", *argv]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")

    def ok(self, *argv: str) -> str:
        done = self.try_(*argv)
        if done.returncode:
            raise RuntimeError(f"{' '.join(argv)}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def write(self, path: str, text: str) -> None:
        """Write a file as the container does: a change behind its overlay may be missed."""
        self.ok("mkdir", "-p", str(Path(path).parent))
        self.ok("sh", "-c", f"cat > {path} <<'END'\n{text}END")

    def shown(self, name: str) -> str:
        return self.ok("systemctl", "show", UNIT, f"--property={name}", "--value")

    def signal(self, number: signal.Signals) -> None:
        self.ok("kill", f"-{number.value}", self.shown("MainPID"))


@contextmanager
def booted() -> Iterator[Container]:
    with tempfile.TemporaryDirectory(prefix="service-") as name:
        changes, root = Path(name, "changes"), Path(name, "root")
        changes.mkdir()
        root.mkdir()
        _mount("-t", "tmpfs", "tmpfs", str(changes))
        for part in ("upper", "work"):
            (changes / part).mkdir()
        options = f"lowerdir=/,upperdir={changes}/upper,workdir={changes}/work"
        _mount("-t", "overlay", "overlay", "-o", options, str(root))
        try:
            yield from _running(root)
        finally:
            subprocess.run(["umount", str(root), str(changes)], check=True)  # noqa: S607


def _running(root: Path) -> Iterator[Container]:
    _let_in(root)
    words = f"systemd-nspawn --directory={root} --register=no --keep-unit --quiet --link-journal=no"
    argv = [*words.split(), "--console=pipe", "--boot", "systemd.unit=basic.target"]
    quiet = subprocess.DEVNULL
    # This checkout may be below /tmp, which nspawn would hide and systemd would empty as it boots.
    environ = {**os.environ, "SYSTEMD_NSPAWN_TMPFS_TMP": "0"}
    (root / "etc" / "tmpfiles.d").mkdir(exist_ok=True)
    (root / "etc" / "tmpfiles.d" / "tmp.conf").write_text("# in place of that in /usr/lib\n")
    nspawn = subprocess.Popen(argv, stdin=quiet, stdout=quiet, stderr=quiet, env=environ)
    found: list[psutil.Process] = []
    try:
        until(lambda: _leaders(nspawn.pid))
        found = _leaders(nspawn.pid)
        container = Container(root, found[0].pid)
        # "degraded" if a unit of this system cannot start there, such as one whose port is taken.
        done = ("running", "degraded")
        until(lambda: container.try_("systemctl", "is-system-running").stdout.strip() in done)
        yield container
    finally:
        for leader in found:
            leader.kill()
        if not found:
            nspawn.kill()
        nspawn.wait()


def _leaders(nspawn: int) -> list[psutil.Process]:
    leaders = []
    for process in psutil.Process(nspawn).children(recursive=True):
        with suppress(psutil.Error):  # it may have ended, as a zombie too
            if "".join(process.cmdline()[:1]).endswith("/systemd"):
                leaders.append(process)
    return leaders


def _let_in(root: Path) -> None:
    """Let the account of the service reach this program, which may be in root's home."""
    for program in (ROOT, Path(sys.base_prefix)):
        for parent in (program, *program.parents):
            inside = root / parent.relative_to("/")
            inside.chmod(inside.stat().st_mode | 0o011)


def _mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)  # noqa: S607


def checks(container: Container, port: int) -> Iterator[tuple[str, bool, str]]:
    """Yield the attempt, whether it went well, and a figure."""
    models = container.root / "srv" / "models"
    models.mkdir(parents=True)
    tiny_gguf.make(models / "tiny.gguf").chmod(0o644)
    container.write(SETTINGS_FILE, SETTINGS.format(port=port))
    key = container.ok(CORRAL, "key", "add", "me", "--config", SETTINGS_FILE)
    container.ok(CORRAL, "slots", "new-key", "--config", SETTINGS_FILE)
    container.ok(CORRAL, "service", "install")
    until(lambda: container.shown("StatusText") == "1 of 1 instances ready")
    yield "installed; models are ready", True, ""
    user = container.ok("ps", "-o", "user=", "-p", container.shown("MainPID"))
    yield "runs as its account", user.startswith("llama-c"), user
    unit = f"/etc/systemd/system/{UNIT}.service"
    said = container.try_("systemd-analyze", "verify", unit)
    yield "systemd-analyze verify", not said.stderr, said.stderr.strip()
    score = container.ok("systemd-analyze", "security", "--threshold=25", UNIT).splitlines()[-1]
    yield "systemd-analyze security", True, score.split(":")[-1].strip()
    yield "without a key", _status(port, None) == 401, str(_status(port, None))
    yield "with a key from a credential", _status(port, key) == 200, str(_status(port, key))
    yield _encrypts(container)
    restarts = [lambda: container.ok("systemctl", "restart", UNIT)] * RESTARTS
    yield f"{RESTARTS} restarts, 8 clients", *_under_load(port, key, restarts)
    before, upgrade = _version(container), _upgrade_steps(container)
    is_well, figures = _under_load(port, key, upgrade)
    after = _version(container)
    yield "upgrade, 8 clients", is_well and (before != after == NEXT), f"to {after}, {figures}"
    yield from _faults(container, port, key, unit)
    container.ok(CORRAL, "service", "uninstall")
    left = container.try_("pgrep", "-f", "llama-server").stdout
    yield "uninstalled; no process is left", not left, left
    container.ok("userdel", "llama-corral")
    removed = container.try_("id", "llama-corral").returncode != 0
    kept = [path for path in KEPT if container.try_("test", "-e", path).returncode == 0]
    yield "the account is removed, the files stay", removed and kept == [*KEPT], " ".join(kept)
    yield _of_user(container, port)


def _of_user(container: Container, port: int) -> tuple[str, bool, str]:
    """Install, restart and uninstall a service of a user."""
    container.ok("useradd", "--create-home", "anna")
    uid = container.ok("id", "-u", "anna")
    container.ok("systemctl", "start", f"user@{uid}.service")
    settings = "/home/anna/.config/llama-corral/corral.toml"
    model = '[models.tiny]\npath = "/srv/models/tiny.gguf"\n'
    container.write(settings, f'{model}[proxy]\nlisten = "127.0.0.1:{port}"\n')
    container.ok("chown", "-R", "anna:", "/home/anna")
    environ = ["env", "HOME=/home/anna", f"XDG_RUNTIME_DIR=/run/user/{uid}"]
    as_anna = ["setpriv", f"--reuid={uid}", "--regid=anna", "--init-groups", *environ]

    def status() -> str:
        return container.try_(*as_anna, CORRAL, "service", "status", "--user").stdout

    container.ok(*as_anna, CORRAL, "service", "install", "--user")
    until(lambda: "1 of 1 instances ready" in status())
    before = status()
    container.ok(*as_anna, "systemctl", "--user", "restart", UNIT)
    until(lambda: before != (now := status()) and "1 of 1 instances ready" in now)
    container.ok(*as_anna, CORRAL, "service", "uninstall", "--user")
    left = container.try_("pgrep", "-f", "llama-server").stdout
    return "a service of a user", not left and status().strip() == "not installed", left


def _faults(
    container: Container, port: int, key: str, unit: str
) -> Iterator[tuple[str, bool, str]]:
    """Yield what becomes of invalid settings, a kill and a hang."""
    container.write(SETTINGS_FILE, SETTINGS.format(port=port) + "nonsense = 1\n")
    refused = container.try_("systemctl", "reload", UNIT).returncode
    active = container.shown("ActiveState")
    yield "reload of invalid settings fails, and it goes on", bool(refused), active
    container.try_("systemctl", "restart", UNIT)
    until(lambda: container.shown("ActiveState") == "failed")
    code, restarts = container.shown("ExecMainStatus"), container.shown("NRestarts")
    yield "invalid settings are not tried again", (code, restarts) == ("78", "0"), f"exit {code}"
    container.write(SETTINGS_FILE, SETTINGS.format(port=port))
    yield "a request starts it again", _status(port, key) == 200, container.shown("ActiveState")
    container.signal(signal.SIGKILL)
    until(lambda: container.shown("NRestarts") == "1")
    yield "restarted after SIGKILL", _status(port, key) == 200, ""
    container.write(f"{unit}.d/watchdog.conf", WATCHDOG)
    container.ok("systemctl", "daemon-reload")
    container.ok("systemctl", "restart", UNIT)
    container.signal(signal.SIGSTOP)
    took_s = until(lambda: container.shown("NRestarts") == "1")
    yield "restarted when it hangs (3 s)", _status(port, key) == 200, f"{took_s:.0f} s"
    entry = container.ok("journalctl", "CORRAL_MODEL=tiny", "-n", "1", "-o", "cat", "--no-pager")
    yield "the journal has fields", "tiny" in entry, ""


def _encrypts(container: Container) -> tuple[str, bool, str]:
    """Save a conversation with the key that is a credential, and restore it."""
    corral = ("env", "CORRAL_RUNTIME_DIR=/run/llama-corral", CORRAL)
    container.write("/srv/long.txt", "the an in of on er th he " * 60)
    container.ok(*corral, "warm", "tiny", "/srv/long.txt")
    container.ok("systemctl", "restart", UNIT)
    until(lambda: container.shown("StatusText") == "1 of 1 instances ready")
    starts = "head -qc 6 /var/lib/llama-corral/slots/kept/tiny/*.slot; ls /run/llama-corral/slots"
    found = container.ok("sh", "-c", starts)
    restored = container.ok("journalctl", "-o", "cat", "--no-pager", "-u", UNIT)
    is_well = found == "corraltiny.0" and "slots.restored" in restored
    return "encrypts with a key from a credential", is_well, found


def _version(container: Container) -> str:
    """Return the version that `corral status` shows for the running daemon."""
    shown = container.ok("env", "CORRAL_RUNTIME_DIR=/run/llama-corral", CORRAL, "status")
    return shown.split()[1]


def _upgrade_steps(container: Container) -> list[Callable[[], object]]:
    """Return the steps of docs/upgrade.md; a version written into the sources replaces pip."""
    sources = str(ROOT / "supervisor" / "__init__.py")
    version = f's/^__version__ = .*/__version__ = "{NEXT}"/'
    steps = (
        ("sed", "-i", version, sources),
        (CORRAL, "config", "check", "--config", SETTINGS_FILE),
        (CORRAL, "service", "install"),
        ("systemctl", "restart", UNIT),
        (CORRAL, "service", "status"),
    )
    return [functools.partial(container.ok, *words) for words in steps]


def _under_load(port: int, key: str, steps: Iterable[Callable[[], object]]) -> tuple[bool, str]:
    clients = [SteadyClient(port, keep_alive=number % 2 == 0, key=key) for number in range(8)]
    for client in clients:
        client.start()
    for step in steps:
        goal = sum(client.answered for client in clients) + 40
        step()
        until(functools.partial(_have_answers, clients, goal))
    for client in clients:
        client.is_stopped = True
        client.join()
    failures = [failure for client in clients for failure in client.failures]
    answered = sum(client.answered for client in clients)
    slowest_s = max(client.slowest_s for client in clients)
    return not failures, f"{answered} answered, {len(failures)} failed, at most {slowest_s:.1f} s"


def _have_answers(clients: Iterable[SteadyClient], goal: int) -> bool:
    return sum(client.answered for client in clients) > goal


def _status(port: int, key: str | None) -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/models", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def main() -> int:
    if os.geteuid():
        print("scripts/service needs root")
        return 1
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    began_at_s, all_well = time.monotonic(), True
    with booted() as container:
        for name, is_well, figure in checks(container, port):
            print(f"{'ok' if is_well else 'NO':3} {name:50} {figure}", flush=True)
            all_well = all_well and is_well
    print(f"{time.monotonic() - began_at_s:.0f} s")
    return 0 if all_well else 1


if __name__ == "__main__":
    raise SystemExit(main())
