"""Faults of resources: files, disks, memory, ports, logs. 17 to 30."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import psutil
from end_to_end.home import until
from faults.daemon_under_test import Place, kill
from faults.fault import Faults, Seen
from faults.pace import since, within

RESOURCES = Faults()

_LOGS_MAX_BYTES = 4 * 16 * 1024**2 + 1024**2


@RESOURCES.add(17, "port for clients is taken")
def _(place: Place) -> Seen:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        place.configure({"m": place.models.tiny}, after=f'[proxy]\nlisten = "127.0.0.1:{port}"')
        failed = place.corral("start")
    yield "exits with 1", f"exits with {failed.returncode}"
    yield "names the port", "names the port" if str(port) in failed.stderr else failed.stderr


@RESOURCES.add(17, "socket of an engine is taken by a leftover")
def _(place: Place) -> Seen:
    (place.home / "run").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(place.home / "run" / "m.0.sock"))
    place.serve({"m": place.models.tiny})
    yield "answered", place.ask("m")


def _bad_model(harm: Callable[[Path, Path], None]) -> Callable[[Place], Seen]:
    def bring(place: Place) -> Seen:
        model = place.home / "bad.gguf"
        harm(model, place.models.tiny)
        place.configure({"m": model})
        began_at_s = time.monotonic()
        failed = place.corral("start")
        took_s = since(began_at_s)
        yield "exits with 78", f"exits with {failed.returncode}"
        yield "names the file", "names the file" if model.name in failed.stderr else failed.stderr
        yield within(5, took_s)

    return bring


RESOURCES.add(18, "model missing", quick=False)(_bad_model(lambda _model, _tiny: None))
RESOURCES.add(19, "model cut short")(
    _bad_model(lambda model, tiny: _write(model, tiny.read_bytes()[:-1000]))
)
RESOURCES.add(20, "model full of zeros", quick=False)(
    _bad_model(lambda model, _: _write(model, bytes(4096)))
)
RESOURCES.add(20, "model empty")(_bad_model(lambda model, _: _write(model, b"")))


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


@RESOURCES.add(21, "model cut short while it is served", quick=False)
def _(place: Place) -> Seen:
    model = place.home / "model.gguf"
    whole = place.models.tiny.read_bytes()
    model.write_bytes(whole)
    place.serve({"m": model}, after="[models.m.flags]\nload-mode = 'mmap'")
    os.truncate(model, 4096)
    place.ask("m")
    yield "failed: model_invalid", place.state_of("m.0", "failed")
    exits = place.events("instance.exited")
    yield "died of SIGBUS", f"died of {_signal_name(exits[0]['signal']) if exits else 'nothing'}"
    model.write_bytes(whole)
    place.corral.ok("start")
    yield "put right, it answers", "put right, it answers" if place.ask("m") == "answered" else "no"


def _signal_name(number: int | None) -> str:
    return {7: "SIGBUS", 11: "SIGSEGV"}.get(number or 0, str(number))


@RESOURCES.add(22, "no room for logs")
def _(place: Place) -> Seen:
    place.serve({"m": place.models.tiny})
    log = place.home / "log" / "m.0.log"
    size_bytes = log.stat().st_size
    daemon = psutil.Process(place.corral.daemon_pid)
    # No file may grow beyond what the log has now: to a writer that is a full disk.
    daemon.rlimit(psutil.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))
    answers = {place.ask("m") for _ in range(3)}
    yield (
        "requests are answered",
        "requests are answered" if answers == {"answered"} else str(answers),
    )
    grown = log.stat().st_size - size_bytes
    yield "the log grows by 0 bytes", f"the log grows by {grown} bytes"
    daemon.rlimit(psutil.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    place.ask("m")
    until(lambda: "the disk refused" in log.read_text("utf-8"))  # with the engine's next line
    yield "what was lost is told", "what was lost is told"


@RESOURCES.add(22, "no room for a saved conversation")
def _(place: Place) -> Seen:
    place.serve({"m": place.models.tiny})
    _read_ahead(place)
    daemon = psutil.Process(place.corral.daemon_pid)
    # A manifest has some hundred bytes more, so that to the daemon the disk is full.
    daemon.rlimit(psutil.RLIMIT_FSIZE, (64, resource.RLIM_INFINITY))
    yield "0 saved", f"{len(place.corral.data('slots', 'save'))} saved"
    left = [path.name for path in (place.home / "data").rglob("*") if path.is_file()]
    yield "no file left", "no file left" if not left else f"left {left}"
    yield "answered", place.ask("m")
    daemon.rlimit(psutil.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    yield "1 saved", f"{len(place.corral.data('slots', 'save'))} saved"


def _read_ahead(place: Place) -> None:
    """Have a slot hold a prompt that is worth saving."""
    (place.home / "long.txt").write_text("the an in of on er th he " * 60)
    place.corral.ok("warm", "m", str(place.home / "long.txt"))


def _bad_slot_file(harm: Callable[[Place, Path], None]) -> Callable[[Place], Seen]:
    def bring(place: Place) -> Seen:
        place.serve({"m": place.models.tiny})
        _read_ahead(place)
        yield "1 saved", f"{len(place.corral.data('slots', 'save'))} saved"
        place.corral.ok("stop")
        (file,) = (place.home / "data" / "slots" / "kept" / "m").glob("*.slot")
        harm(place, file)
        place.corral.ok("start")
        yield "answered", place.ask("m")
        moved = [one["file"] for one in place.events("slots.quarantined")]
        yield "moved aside", "moved aside" if moved == [file.stem] else f"moved {moved}"
        log = (place.home / "log" / "m.0.log").read_text("utf-8", "replace")
        shown = "restore" in log.rpartition("[llama-corral: run")[2]
        yield "not shown to the engine", "shown" if shown else "not shown to the engine"
        yield "no engine died", "no engine died" if not _faults(place) else "an engine died"

    return bring


def _faults(place: Place) -> list[object]:
    return [one for one in place.events("instance.exited") if one["fault"]]


def _flip(_: Place, file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _cut(share: float) -> Callable[[Place, Path], None]:
    return lambda _, file: os.truncate(file, int(file.stat().st_size * share))


def _change_model(place: Place, _: Path) -> None:
    place.configure({"m": place.models.slow})


RESOURCES.add(23, "slot file cut to 1 %", quick=False)(_bad_slot_file(_cut(0.01)))
RESOURCES.add(23, "slot file cut to 50 %", quick=False)(_bad_slot_file(_cut(0.5)))
RESOURCES.add(23, "slot file cut to 99.9 %")(_bad_slot_file(_cut(0.999)))
RESOURCES.add(23, "slot file with one bit flipped")(_bad_slot_file(_flip))
RESOURCES.add(23, "slot file of another model")(_bad_slot_file(_change_model))


@RESOURCES.add(24, "daemon out of file descriptors")
def _(place: Place) -> Seen:
    place.serve({"m": place.models.tiny})
    before = place.pid("m.0")
    host, _, port = place.corral.url.removeprefix("http://").rpartition(":")
    daemon = psutil.Process(place.corral.daemon_pid)
    limits = daemon.rlimit(psutil.RLIMIT_NOFILE)
    daemon.rlimit(psutil.RLIMIT_NOFILE, (daemon.num_fds() + 4, limits[1]))
    with ExitStack() as crowd:
        for _ in range(40):
            crowd.enter_context(socket.create_connection((host, int(port)), timeout=5))
        yield "daemon lives", "daemon lives" if daemon.is_running() else "daemon gone"
    until(lambda: place.ask("m") == "answered")
    daemon.rlimit(psutil.RLIMIT_NOFILE, limits)
    yield "it recovers", "it recovers"
    yield "same engine", "same engine" if place.pid("m.0") == before else "another engine"


@RESOURCES.add(25, "engine killed as the kernel does it, out of memory")
def _(place: Place) -> Seen:
    place.serve({"m": place.models.tiny})
    before = place.pid("m.0")
    kill(before)
    yield "ready again", place.ready_again("m.0", before)
    faults = [one for one in place.events("instance.state_changed") if one["after"] == "backoff"]
    yield (
        "after a pause, for the cause killed",
        f"after a pause, for the cause {faults[0]['reason']}",
    )
    yield "1 restart", f"{place.instance('m.0')['restarts']} restart"


@RESOURCES.add(26, "client that does not read its endless stream", quick=False)
def _(place: Place) -> Seen:
    engine = place.stand_in("exec $FAKE --fault flood-stream")
    place.serve({"m": place.models.tiny}, f'engine = "{engine}"')
    daemon = psutil.Process(place.corral.daemon_pid)
    before = daemon.memory_info().rss
    stream = place.stream("m")
    time.sleep(2)  # what the engine writes meanwhile would be gigabytes
    grown_mib = (daemon.memory_info().rss - before) >> 20
    yield "under 32 MiB more", "under 32 MiB more" if grown_mib < 32 else f"{grown_mib} MiB more"
    stream.close()
    yield "answered", "answered" if place.stream("m").readline() else "not answered"


def _flood(words: str) -> Callable[[Place], Seen]:
    def bring(place: Place) -> Seen:
        engine = place.stand_in(f"exec $FAKE {words}")
        place.configure({"m": place.models.tiny}, f'engine = "{engine}"')
        place.corral.serve(until_ready=False)
        until((place.home / "run" / "control.sock").exists)
        slowest_s = _slowest_status_s(place)
        yield "ready", place.instance("m.0")["state"]
        yield within(0.5, slowest_s, "answers")
        logs = sum(file.stat().st_size for file in (place.home / "log").iterdir())
        kept = "bounded" if logs < _LOGS_MAX_BYTES else f"{logs >> 20} MiB"
        yield "logs bounded", f"logs {kept}"

    return bring


def _slowest_status_s(place: Place) -> float:
    """Ask for the status until the engine is done with its flood; return the longest wait."""
    slowest_s, state = 0.0, ""
    while state not in {"ready", "backoff", "failed"}:
        began_at_s = time.monotonic()
        state = place.instance("m.0")["state"]
        slowest_s = max(slowest_s, since(began_at_s))
    return slowest_s


RESOURCES.add(27, "100 MB of log")(_flood("--fault flood-stderr=100000000"))
RESOURCES.add(27, "100 MB of bytes without a newline")(_flood("--fault endless-line=100000000"))
RESOURCES.add(27, "1 GB of log", quick=False)(_flood("--fault flood-stderr=1000000000"))
RESOURCES.add(27, "1 GB of bytes without a newline", quick=False)(
    _flood("--fault endless-line=1000000000")
)


def _denied(variable: str) -> Callable[[Place], Seen]:
    def bring(place: Place) -> Seen:
        # A file in its place denies a directory to everybody, root included.
        in_the_way = place.home / "file"
        in_the_way.write_text("x")
        place.corral.env[variable] = str(in_the_way / "below")
        place.configure({"m": place.models.tiny})
        failed = place.corral("start")
        yield "exits with 1", f"exits with {failed.returncode}"
        yield "names it", "names it" if str(in_the_way) in failed.stderr else failed.stderr

    return bring


RESOURCES.add(28, "log directory denied")(_denied("CORRAL_LOG_DIR"))
RESOURCES.add(28, "runtime directory denied")(_denied("CORRAL_RUNTIME_DIR"))


@RESOURCES.add(29, "link planted where an engine's log goes")
def _(place: Place) -> Seen:
    victim = place.home / "victim"
    victim.write_text("precious")
    (place.home / "log").mkdir(mode=0o700)
    (place.home / "log" / "m.0.log").symlink_to(victim)
    place.configure({"m": place.models.tiny})
    failed = place.corral("start")
    yield "exits with 1", f"exits with {failed.returncode}"
    yield "victim untouched", f"victim {_touched(victim)}"


@RESOURCES.add(29, "links planted where sockets and the state file go")
def _(place: Place) -> Seen:
    victim = place.home / "victim"
    victim.write_text("precious")
    (place.home / "run").mkdir(mode=0o700)
    for name in ("control.sock", "m.0.sock", "daemon.json", "daemon.tmp"):
        (place.home / "run" / name).symlink_to(victim)
    place.serve({"m": place.models.tiny})
    yield "answered", place.ask("m")
    yield "victim untouched", f"victim {_touched(victim)}"


@RESOURCES.add(29, "link planted where the runtime directory goes")
def _(place: Place) -> Seen:
    (place.home / "elsewhere").mkdir()
    (place.home / "run").symlink_to(place.home / "elsewhere")
    place.configure({"m": place.models.tiny})
    failed = place.corral("start")
    yield "exits with 1", f"exits with {failed.returncode}"
    left = [*(place.home / "elsewhere").iterdir()]
    yield "nothing written there", "nothing written there" if not left else f"wrote {left}"


def _touched(victim: Path) -> str:
    return "untouched" if victim.read_text() == "precious" else "touched"
