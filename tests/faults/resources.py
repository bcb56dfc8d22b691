"""Files, disks, memory, ports, logs. 17 to 30."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil
from faults.daemon_under_test import DaemonUnderTest, kill
from faults.fault import Faults, Seen
from faults.pace import since, within
from support.corral_cli import until

RESOURCES = Faults()

_LOGS_MAX_BYTES = 4 * 16 * 1024**2 + 1024**2


@RESOURCES.add(17, "port for clients is taken")
def _(target: DaemonUnderTest) -> Seen:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        target.configure({"m": target.models.tiny}, after=f'[proxy]\nlisten = "127.0.0.1:{port}"')
        failed = target.corral("start")
    yield "exits with 1", f"exits with {failed.returncode}"
    yield "names the port", "names the port" if str(port) in failed.stderr else failed.stderr


@RESOURCES.add(17, "socket of an engine is taken by a leftover")
def _(target: DaemonUnderTest) -> Seen:
    (target.root / "run").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(target.root / "run" / "m.0.sock"))
    target.serve({"m": target.models.tiny})
    yield "answered", target.ask("m")


def _bad_model(harm: Callable[[Path, Path], None]) -> Callable[[DaemonUnderTest], Seen]:
    def inject(target: DaemonUnderTest) -> Seen:
        model = target.root / "bad.gguf"
        harm(model, target.models.tiny)
        target.configure({"m": model})
        began_at_s = time.monotonic()
        failed = target.corral("start")
        took_s = since(began_at_s)
        yield "exits with 78", f"exits with {failed.returncode}"
        yield "names the file", "names the file" if model.name in failed.stderr else failed.stderr
        yield within(5, took_s)

    return inject


RESOURCES.add(18, "model missing")(_bad_model(lambda _model, _tiny: None))
RESOURCES.add(19, "model cut short")(
    _bad_model(lambda model, tiny: _write(model, tiny.read_bytes()[:-1000]))
)
RESOURCES.add(20, "model full of zeros")(_bad_model(lambda model, _: _write(model, bytes(4096))))
RESOURCES.add(20, "model empty")(_bad_model(lambda model, _: _write(model, b"")))


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


@RESOURCES.add(21, "model cut short while it is served")
def _(target: DaemonUnderTest) -> Seen:
    model = target.root / "model.gguf"
    whole = target.models.tiny.read_bytes()
    model.write_bytes(whole)
    target.serve({"m": model}, after="[models.m.flags]\nload-mode = 'mmap'")
    os.truncate(model, 4096)
    target.ask("m")
    yield "failed: model_invalid", target.state_of("m.0", "failed")
    exits = target.events("instance.exited")
    yield "died of SIGBUS", f"died of {_signal_name(exits[0]['signal']) if exits else 'nothing'}"
    model.write_bytes(whole)
    target.corral.ok("start")
    yield (
        "put right, it answers",
        "put right, it answers" if target.ask("m") == "answered" else "no",
    )


def _signal_name(number: int | None) -> str:
    return {7: "SIGBUS", 11: "SIGSEGV"}.get(number or 0, str(number))


@RESOURCES.add(22, "no room for logs", quick=True)
def _(target: DaemonUnderTest) -> Seen:
    engine = target.write_engine("exec $FAKE")  # it writes a line for each request
    target.serve({"m": target.models.tiny}, f'engine = "{engine}"')
    log = target.root / "log" / "m.0.log"
    daemon = psutil.Process(target.corral.daemon_pid)
    # No file may grow beyond what the log has now: to a writer that is a full disk.
    daemon.rlimit(psutil.RLIMIT_FSIZE, (log.stat().st_size, resource.RLIM_INFINITY))
    size_bytes = log.stat().st_size
    answers = {target.ask("m") for _ in range(3)}
    yield (
        "requests are answered",
        "requests are answered" if answers == {"answered"} else str(answers),
    )
    grown = log.stat().st_size - size_bytes
    yield "the log grows by 0 bytes", f"the log grows by {grown} bytes"
    daemon.rlimit(psutil.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    until(lambda: target.ask("m") and "the disk refused" in log.read_text("utf-8"))
    yield "the loss is logged", "the loss is logged"


@RESOURCES.add(22, "no room for a saved conversation")
def _(target: DaemonUnderTest) -> Seen:
    target.serve({"m": target.models.tiny})
    _read_ahead(target)
    daemon = psutil.Process(target.corral.daemon_pid)
    # A manifest has some hundred bytes more, so that to the daemon the disk is full.
    daemon.rlimit(psutil.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
    yield "0 saved", f"{len(target.corral.data('slots', 'save'))} saved"
    left = [path.name for path in (target.root / "data").rglob("*") if path.is_file()]
    yield "no file left", "no file left" if not left else f"left {left}"
    yield "answered", target.ask("m")
    daemon.rlimit(psutil.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    yield "1 saved", f"{len(target.corral.data('slots', 'save'))} saved"


def _read_ahead(target: DaemonUnderTest) -> None:
    """Prefill a prompt long enough to be saved."""
    (target.root / "long.txt").write_text("the an in of on er th he " * 60)
    target.corral.ok("warm", "m", str(target.root / "long.txt"))


def _bad_slot_file(
    harm: Callable[[DaemonUnderTest, Path], None], becomes: str = "moved aside"
) -> Callable[[DaemonUnderTest], Seen]:
    def inject(target: DaemonUnderTest) -> Seen:
        target.serve({"m": target.models.tiny})
        _read_ahead(target)
        yield "1 saved", f"{len(target.corral.data('slots', 'save'))} saved"
        target.corral.ok("stop")
        (file,) = (target.root / "data" / "slots" / "kept" / "m").glob("*.slot")
        harm(target, file)
        target.corral.ok("start")
        yield "answered", target.ask("m")
        quarantined = target.events("slots.quarantined")
        moved = [file["file"] for file in quarantined]
        yield becomes, "moved aside" if moved == [file.stem] else "left alone"
        by_engine = [file for file in quarantined if file["reason"].startswith("the engine")]
        shown = bool(by_engine or target.events("slots.restored"))
        yield "not shown to the engine", "shown" if shown else "not shown to the engine"
        yield "no engine died", "no engine died" if not _faults(target) else "an engine died"

    return inject


def _other_key(target: DaemonUnderTest) -> Seen:
    """Replace the key of a saved conversation by another one, and put it back."""
    key = target.root / "slots.key"
    key.touch(0o600)
    key.write_text("01" * 32)
    target.serve({"m": target.models.tiny}, f'[supervisor]\nslots_key_file = "{key}"')
    _read_ahead(target)
    yield "1 saved", f"{len(target.corral.data('slots', 'save'))} saved"
    target.corral.ok("stop")
    key.write_text("02" * 32)
    target.corral.ok("start")
    yield "answered", target.ask("m")
    yield "not restored", "restored" if target.events("slots.restored") else "not restored"
    missing = [event["files"] for event in target.events("slots.key_missing")]
    yield "key missing for [1]", f"key missing for {missing}"
    target.corral.ok("stop")
    key.write_text("01" * 32)
    target.corral.ok("start")
    yield "restored", "restored" if target.events("slots.restored") else "not restored"
    aside = target.events("slots.quarantined")
    yield "nothing moved aside", f"moved {aside}" if aside else "nothing moved aside"


def _faults(target: DaemonUnderTest) -> list[object]:
    return [event for event in target.events("instance.exited") if event["fault"]]


def _flip(_: DaemonUnderTest, file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _cut(share: float) -> Callable[[DaemonUnderTest, Path], None]:
    return lambda _, file: os.truncate(file, int(file.stat().st_size * share))


def _change_model(target: DaemonUnderTest, _: Path) -> None:
    target.configure({"m": target.models.slow})


RESOURCES.add(23, "slot file cut to 1 %")(_bad_slot_file(_cut(0.01)))
RESOURCES.add(23, "slot file cut to 50 %")(_bad_slot_file(_cut(0.5)))
RESOURCES.add(23, "slot file cut to 99.9 %")(_bad_slot_file(_cut(0.999)))
RESOURCES.add(23, "slot file with one bit flipped", quick=True)(_bad_slot_file(_flip))
RESOURCES.add(23, "slot file of another model")(_bad_slot_file(_change_model, "left alone"))
RESOURCES.add(23, "slot file of another key")(_other_key)


@RESOURCES.add(24, "daemon out of file descriptors", quick=True)
def _(target: DaemonUnderTest) -> Seen:
    target.serve({"m": target.models.tiny})
    before = target.pid("m.0")
    host, _, port = target.corral.url.removeprefix("http://").rpartition(":")
    daemon = psutil.Process(target.corral.daemon_pid)
    limits = daemon.rlimit(psutil.RLIMIT_NOFILE)
    daemon.rlimit(psutil.RLIMIT_NOFILE, (daemon.num_fds() + 4, limits[1]))
    with ExitStack() as crowd:
        for _ in range(40):
            crowd.enter_context(socket.create_connection((host, int(port)), timeout=5))
        yield "daemon lives", "daemon lives" if daemon.is_running() else "daemon gone"
    until(lambda: target.ask("m") == "answered")
    daemon.rlimit(psutil.RLIMIT_NOFILE, limits)
    yield "it recovers", "it recovers"
    yield "same engine", "same engine" if target.pid("m.0") == before else "another engine"


@RESOURCES.add(25, "engine killed as the kernel does it, out of memory")
def _(target: DaemonUnderTest) -> Seen:
    target.serve({"m": target.models.tiny})
    before = target.pid("m.0")
    kill(before)
    yield "ready again", target.ready_again("m.0", before)
    faults = [
        event for event in target.events("instance.state_changed") if event["after"] == "backoff"
    ]
    yield (
        "after a pause, for the cause killed",
        f"after a pause, for the cause {faults[0]['reason']}",
    )
    yield "1 restart", f"{target.instance('m.0').restarts} restart"


_TAKEN_MIB = 256


@RESOURCES.add(26, "client that does not read its endless stream")
def _(target: DaemonUnderTest) -> Seen:
    engine = target.write_engine("exec $FAKE --fault flood-stream")
    target.serve({"m": target.models.tiny}, f'engine = "{engine}"')
    daemon = psutil.Process(target.corral.daemon_pid)
    before = daemon.memory_info().rss
    stream, taken = target.stream("m"), target.stream("m")
    for _ in range(_TAKEN_MIB):  # the engine offers as much to the client that does not read
        taken.read(1 << 20)
    grown_mib = (daemon.memory_info().rss - before) >> 20
    yield "under 32 MiB more", "under 32 MiB more" if grown_mib < 32 else f"{grown_mib} MiB more"
    for each in (stream, taken):
        each.close()
    yield "answered", "answered" if target.stream("m").readline() else "not answered"


def _flood(words: str) -> Callable[[DaemonUnderTest], Seen]:
    def inject(target: DaemonUnderTest) -> Seen:
        engine = target.write_engine(f"exec $FAKE {words}")
        target.configure({"m": target.models.tiny}, f'engine = "{engine}"')
        target.corral.serve(until_ready=False)
        until((target.root / "run" / "control.sock").exists)
        slowest_s = _slowest_status_s(target)
        yield "ready", target.instance("m.0").state
        yield within(0.5, slowest_s, "answers")
        logs = sum(file.stat().st_size for file in (target.root / "log").iterdir())
        kept = "bounded" if logs < _LOGS_MAX_BYTES else f"{logs >> 20} MiB"
        yield "logs bounded", f"logs {kept}"

    return inject


def _slowest_status_s(target: DaemonUnderTest) -> float:
    """Poll the status until the engine has written all; return the longest time of a status."""
    slowest_s, state = 0.0, ""
    while state not in {"ready", "backoff", "failed"}:
        began_at_s = time.monotonic()
        state = target.instance("m.0").state
        slowest_s = max(slowest_s, since(began_at_s))
    return slowest_s


RESOURCES.add(27, "100 MB of log")(_flood("--fault flood-stderr=100000000"))
RESOURCES.add(27, "100 MB of bytes without a newline")(_flood("--fault endless-line=100000000"))
RESOURCES.add(27, "1 GB of log")(_flood("--fault flood-stderr=1000000000"))
RESOURCES.add(27, "1 GB of bytes without a newline")(_flood("--fault endless-line=1000000000"))


def _denied(variable: str) -> Callable[[DaemonUnderTest], Seen]:
    def inject(target: DaemonUnderTest) -> Seen:
        # A file in its target denies a directory to everybody, root included.
        in_the_way = target.root / "file"
        in_the_way.write_text("x")
        target.corral.env[variable] = str(in_the_way / "below")
        target.configure({"m": target.models.tiny})
        failed = target.corral("start")
        yield "exits with 1", f"exits with {failed.returncode}"
        yield "names it", "names it" if str(in_the_way) in failed.stderr else failed.stderr

    return inject


RESOURCES.add(28, "log directory denied")(_denied("CORRAL_LOG_DIR"))
RESOURCES.add(28, "runtime directory denied")(_denied("CORRAL_RUNTIME_DIR"))


@RESOURCES.add(29, "link planted where an engine's log goes")
def _(target: DaemonUnderTest) -> Seen:
    victim = target.root / "victim"
    victim.write_text("precious")
    (target.root / "log").mkdir(mode=0o700)
    (target.root / "log" / "m.0.log").symlink_to(victim)
    target.configure({"m": target.models.tiny})
    failed = target.corral("start")
    yield "exits with 1", f"exits with {failed.returncode}"
    yield "victim untouched", f"victim {_touched(victim)}"


@RESOURCES.add(29, "links planted where sockets and the state file go")
def _(target: DaemonUnderTest) -> Seen:
    victim = target.root / "victim"
    victim.write_text("precious")
    (target.root / "run").mkdir(mode=0o700)
    for name in ("control.sock", "m.0.sock", "daemon.json", "daemon.tmp"):
        (target.root / "run" / name).symlink_to(victim)
    target.serve({"m": target.models.tiny})
    yield "answered", target.ask("m")
    yield "victim untouched", f"victim {_touched(victim)}"


@RESOURCES.add(29, "link planted where the runtime directory goes")
def _(target: DaemonUnderTest) -> Seen:
    (target.root / "elsewhere").mkdir()
    (target.root / "run").symlink_to(target.root / "elsewhere")
    target.configure({"m": target.models.tiny})
    failed = target.corral("start")
    yield "exits with 1", f"exits with {failed.returncode}"
    left = [*(target.root / "elsewhere").iterdir()]
    yield "nothing written there", "nothing written there" if not left else f"wrote {left}"


def _touched(victim: Path) -> str:
    return "untouched" if victim.read_text() == "precious" else "touched"
