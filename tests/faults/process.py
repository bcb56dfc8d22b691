"""Faults of processes: engines and daemons that die, hang, stop, and come twice. 1 to 16."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import psutil
from end_to_end.home import until
from faults.daemon_under_test import Place, ending, gone, is_alive, kill
from faults.endurance import restart_often
from faults.fault import Faults, Seen
from faults.pace import since, within

from supervisor.host.lock import DaemonInfo, write_owner

PROCESS = Faults()


@PROCESS.add(1, "engine killed in the middle of a stream")
def _(place: Place) -> Seen:
    place.serve({"a": place.models.slow, "b": place.models.slow})
    mine, other = place.stream("a"), place.stream("b")
    before = place.pid("a.0")
    began_at_s = time.monotonic()
    kill(before)
    yield "its stream ends in an error event", f"its stream {ending(mine)}"
    yield within(1, since(began_at_s))
    yield "others go on", "others go on" if other.readline() else "others end"
    yield "ready again", place.ready_again("a.0", before)
    other.close()


@PROCESS.add(2, "engine dies of SIGSEGV at every start")
def _(place: Place) -> Seen:
    engine = place.stand_in("kill -SEGV $$")
    impatient = "[supervisor.restart]\nbackoff_initial_s = 0.05\nmax_failures = 3"
    place.configure({"m": place.models.tiny}, f'engine = "{engine}"\n{impatient}')
    daemon = place.corral.serve(until_ready=False)
    until((place.home / "run" / "control.sock").exists)
    yield "failed: memory_fault", place.state_of("m.0", "failed")
    yield "2 restarts", f"{place.instance('m.0')['restarts']} restarts"
    yield "daemon lives", "daemon lives" if daemon.poll() is None else "daemon gone"


@PROCESS.add(3, "engine stopped by SIGSTOP while it works")
def _(place: Place) -> Seen:
    interval_s = 1
    watch = f"[supervisor]\nliveness_interval_s = {interval_s}\nstop_timeout_s = 1"
    place.serve({"m": place.models.slow}, watch, "replicas = 2")
    mine = place.stream("m")
    name = next(one for one in ("m.0", "m.1") if place.instance(one)["slots_busy"])
    other = place.stream("m")
    before = place.pid(name)
    psutil.Process(before).suspend()
    took_s = until(lambda: place.instance(name)["state"] != "ready")
    # Two intervals, and what it takes to see it.
    yield within(2.2 * interval_s, took_s, "out")
    yield "its stream ends in an error event", f"its stream {ending(mine)}"
    answers = {place.ask("m") for _ in range(4)}
    yield "new requests are answered", _answers(answers)
    yield "others go on", "others go on" if other.readline() else "others end"
    other.close()
    yield "ready again", place.ready_again(name, before)


def _answers(answers: set[str]) -> str:
    return "new requests are answered" if answers == {"answered"} else str(answers)


@PROCESS.add(4, "engine wedged, and healthy to look at (a fake one)", quick=False)
def _(place: Place) -> Seen:
    # The real engine cannot be brought to it from outside.
    engine = place.stand_in("exec $FAKE --fault wedged")
    watch = "[supervisor]\nliveness_interval_s = 1\nidle_probe_s = 2\nunhealthy_timeout_s = 2"
    place.serve({"m": place.models.tiny}, f'engine = "{engine}"\n{watch}')
    before = place.pid("m.0")
    yield "ready again", place.ready_again("m.0", before)
    said = [one["after"] for one in place.events("instance.state_changed")]
    yield "unhealthy before", "unhealthy before" if "unhealthy" in said else ", ".join(said)


@PROCESS.add(5, "engine deaf to every request to leave")
def _(place: Place) -> Seen:
    engine = place.stand_in("exec $FAKE --fault ignore-sigterm")
    place.serve(
        {"m": place.models.tiny}, f'engine = "{engine}"\n[supervisor]\nstop_timeout_s = 0.5'
    )
    pid = place.pid("m.0")
    place.corral.ok("stop", "m")
    yield "killed", "killed" if not is_alive(pid) else "alive"
    after = [event["after"] for event in place.events("instance.state_changed")]
    yield "draining, stopping, killing, stopped", ", ".join(after[-4:])


@PROCESS.add(5, "engine asked to leave while it answers")
def _(place: Place) -> Seen:
    limits = "[supervisor]\ndrain_timeout_s = 0.2\nstop_timeout_s = 2"
    place.serve({"m": place.models.slow}, limits)
    stream = place.stream("m")
    began_at_s = time.monotonic()
    place.corral.ok("stop", "m")
    yield within(3, since(began_at_s), "stopped")
    yield "its stream ends in an error event", f"its stream {ending(stream)}"


@PROCESS.add(6, "engine exits with 0 unasked")
def _(place: Place) -> Seen:
    place.serve({"m": place.models.tiny})
    before = place.pid("m.0")
    # Its stdin is our pipe; through /proc a second writer can be opened.
    Path(f"/proc/{before}/fd/0").write_bytes(b"cmd_router_to_child:exit\n")
    yield "ready again", place.ready_again("m.0", before)
    (exit_event,) = place.events("instance.exited")
    yield "exit code 0", f"exit code {exit_event['code']}"


@PROCESS.add(7, "engine with a child of its own is killed")
def _(place: Place) -> Seen:
    engine = place.stand_in('sleep 600 &\nexec $ENGINE "$@"')
    place.serve({"m": place.models.tiny}, f'engine = "{engine}"')
    before = place.pid("m.0")
    (child,) = psutil.Process(before).children()
    kill(before)
    yield "its child is gone", f"its child is {gone(child.pid)}"
    yield "ready again", place.ready_again("m.0", before)


@PROCESS.add(8, "daemon killed")
def _(place: Place) -> Seen:
    place.serve({"m": place.models.tiny}, after="replicas = 2")
    kill(place.corral.daemon_pid)
    yield within(2, until(lambda: not place.corral.engines()), "engines gone")
    place.corral.ok("start")
    yield "the next start works", "the next start works" if place.ask("m") == "answered" else "no"


@PROCESS.add(9, "daemon stopped for a while and continued", quick=False)
def _(place: Place) -> Seen:
    place.serve({"m": place.models.tiny}, after="replicas = 2")
    before = [place.pid("m.0"), place.pid("m.1")]
    daemon = psutil.Process(place.corral.daemon_pid)
    daemon.suspend()
    time.sleep(8)  # more than two intervals of any watch: the fault is the time that passes
    daemon.resume()
    yield "answered", place.ask("m")
    after = [place.pid("m.0"), place.pid("m.1")]
    yield "same engines", "same engines" if after == before else f"{before} became {after}"


@PROCESS.add(10, "daemon told to end three times", quick=False)
def _(place: Place) -> Seen:
    place.configure({"m": place.models.slow})
    daemon = place.corral.serve()
    stream = place.stream("m")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        # Each is heard before the next is sent, or two would be one.
        daemon.send_signal(number)
        until(lambda: daemon.poll() is not None or place.client.status()["stopping"])
    began_at_s = time.monotonic()
    daemon.wait(10)
    yield within(3, since(began_at_s), "gone")
    yield "its stream ends in an error event", f"its stream {ending(stream)}"


@PROCESS.add(11, "settings broken, then SIGHUP and corral reload")
def _(place: Place) -> Seen:
    place.serve({"m": place.models.tiny})
    before, daemon = place.pid("m.0"), place.corral.daemon_pid
    place.configure({"m": place.models.tiny}, after="replica = 3")
    psutil.Process(daemon).send_signal(signal.SIGHUP)
    until(lambda: place.events("settings.rejected") or not is_alive(daemon))
    (refusal,) = place.events("settings.rejected")
    yield "SIGHUP is refused for replica", f"SIGHUP is refused for {_named(str(refusal['reason']))}"
    refused = place.corral("reload")
    yield "reload exits with 78", f"reload exits with {refused.returncode}"
    yield "and names replica", f"and names {_named(refused.stderr)}"
    yield "same daemon", "same daemon" if is_alive(daemon) else "daemon gone"
    yield "same engine", "same engine" if place.pid("m.0") == before else "another engine"
    yield "answered", place.ask("m")


def _named(text: str) -> str:
    return "replica" if "models.m.replica is unknown" in text else text


@PROCESS.add(12, "Ctrl-C at each phase of a start")
def _(place: Place) -> Seen:
    place.configure({"m": place.models.tiny})
    socket = place.home / "run" / "control.sock"
    phases = {
        "at once": lambda: True,
        "listening": socket.exists,
        "loading": place.corral.engines,
        "ready": lambda: socket.exists() and place.instance("m.0")["state"] == "ready",
    }
    for name, is_reached in phases.items():
        daemon = place.corral.serve(until_ready=False)
        until(is_reached)
        daemon.send_signal(signal.SIGINT)
        daemon.wait(10)
        until(lambda: not place.corral.engines())
        yield f"{name}: none left", f"{name}: none left"


@PROCESS.add(13, "ten restarts")
def _(place: Place) -> Seen:
    place.serve({"m": place.models.tiny})
    kept = restart_often(place, 10)
    yield "0 zombies", f"{kept.zombies} zombies"
    yield "0 files more", f"{kept.files_after - kept.files_before} files more"


@PROCESS.add(14, "state file names a recycled pid")
def _(place: Place) -> Seen:
    stranger = subprocess.Popen(["/bin/sleep", "60"])
    try:
        (place.home / "run").mkdir(mode=0o700)
        state = place.home / "run" / "daemon.json"
        write_owner(state, DaemonInfo(stranger.pid, 1.0, "0", "http://127.0.0.1:1"))
        place.serve({"m": place.models.tiny})
        daemon = place.client.status()["pid"]
        replaced = place.corral.daemon_pid == daemon
        yield "replaced", "replaced" if replaced else "not replaced"
        place.corral.ok("stop")
        yield "stranger lives", "stranger lives" if stranger.poll() is None else "stranger killed"
    finally:
        stranger.kill()
        stranger.wait()


@PROCESS.add(15, "second daemon in the same directory", quick=False)
def _(place: Place) -> Seen:
    place.serve({"m": place.models.tiny})
    refused = place.corral("serve")
    yield "exits with 69", f"exits with {refused.returncode}"
    named = f"pid {place.corral.daemon_pid}" in refused.stderr
    yield "names the owner", "names the owner" if named else refused.stderr
    yield "the first answers", "the first answers" if place.ask("m") == "answered" else "no"


@PROCESS.add(16, "engine removed, then one instance dies")
def _(place: Place) -> Seen:
    engine = place.stand_in('exec $ENGINE "$@"')
    place.serve({"a": place.models.tiny, "b": place.models.tiny}, f'engine = "{engine}"')
    other = place.pid("b.0")
    engine.unlink()
    kill(place.pid("a.0"))
    yield "failed: engine_missing", place.state_of("a.0", "failed")
    yield "others go on", "others go on" if place.pid("b.0") == other else "others restarted"
    place.stand_in('exec $ENGINE "$@"')
    place.corral.ok("start", "a")
    yield "put back, it starts", "put back, it starts" if place.ask("a") == "answered" else "no"
