"""Engines and daemons that crash, hang, are suspended, or run twice. 1 to 16."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import psutil
from faults.daemon_under_test import DaemonUnderTest, ending, gone, is_alive, kill
from faults.endurance import restart_often
from faults.fault import Faults, Seen
from faults.pace import since, within
from support.corral_cli import until

from supervisor.system.daemon_lock import DaemonInfo, write_owner

PROCESS = Faults()


@PROCESS.add(1, "engine killed in the middle of a stream")
def _(target: DaemonUnderTest) -> Seen:
    target.serve({"a": target.models.slow, "b": target.models.slow})
    mine, other = target.stream("a"), target.stream("b")
    before = target.pid("a.0")
    began_at_s = time.monotonic()
    kill(before)
    yield "its stream ends in an error event", f"its stream {ending(mine)}"
    yield within(1, since(began_at_s))
    yield "others continue", "others continue" if other.readline() else "others end"
    yield "ready again", target.ready_again("a.0", before)
    other.close()


@PROCESS.add(2, "engine dies of SIGSEGV at every start")
def _(target: DaemonUnderTest) -> Seen:
    engine = target.write_engine("kill -SEGV $$")
    impatient = "[supervisor.restart]\nbackoff_initial_s = 0.05\nmax_failures = 3"
    target.configure({"m": target.models.tiny}, f'engine = "{engine}"\n{impatient}')
    daemon = target.corral.serve(until_ready=False)
    until((target.root / "run" / "control.sock").exists)
    yield "failed: memory_fault", target.state_of("m.0", "failed")
    yield "2 restarts", f"{target.instance('m.0').restarts} restarts"
    yield "daemon lives", "daemon lives" if daemon.poll() is None else "daemon gone"


@PROCESS.add(3, "engine stopped by SIGSTOP while it works")
def _(target: DaemonUnderTest) -> Seen:
    interval_s = 1
    watch = f"[supervisor]\nliveness_interval_s = {interval_s}\nstop_timeout_s = 1"
    target.serve({"m": target.models.slow}, watch, "replicas = 2")
    mine = target.stream("m")
    name = next(name for name in ("m.0", "m.1") if target.instance(name).slots_busy)
    other = target.stream("m")
    before = target.pid(name)
    psutil.Process(before).suspend()
    took_s = until(lambda: target.instance(name).state != "ready")
    # Two intervals, and the time to notice it.
    yield within(2.2 * interval_s, took_s, "out")
    yield "its stream ends in an error event", f"its stream {ending(mine)}"
    answers = {target.ask("m") for _ in range(4)}
    yield "new requests are answered", _answers(answers)
    yield "others continue", "others continue" if other.readline() else "others end"
    other.close()
    yield "ready again", target.ready_again(name, before)


def _answers(answers: set[str]) -> str:
    return "new requests are answered" if answers == {"answered"} else str(answers)


@PROCESS.add(4, "engine that hangs and reports ok (a fake)")
def _(target: DaemonUnderTest) -> Seen:
    # The real engine cannot be brought to it from outside.
    engine = target.write_engine("exec $FAKE --fault wedged")
    watch = "[supervisor]\nliveness_interval_s = 1\nidle_probe_s = 2\nunhealthy_timeout_s = 2"
    target.serve({"m": target.models.tiny}, f'engine = "{engine}"\n{watch}')
    before = target.pid("m.0")
    yield "ready again", target.ready_again("m.0", before)
    said = [event["after"] for event in target.events("instance.state_changed")]
    yield "unhealthy before", "unhealthy before" if "unhealthy" in said else ", ".join(said)


@PROCESS.add(5, "engine that ignores SIGTERM")
def _(target: DaemonUnderTest) -> Seen:
    engine = target.write_engine("exec $FAKE --fault ignore-sigterm")
    target.serve(
        {"m": target.models.tiny}, f'engine = "{engine}"\n[supervisor]\nstop_timeout_s = 0.5'
    )
    pid = target.pid("m.0")
    target.corral.ok("stop", "m")
    yield "killed", "killed" if not is_alive(pid) else "alive"
    after = [event["after"] for event in target.events("instance.state_changed")]
    yield "draining, stopping, killing, stopped", ", ".join(after[-4:])


@PROCESS.add(5, "engine stopped while it answers")
def _(target: DaemonUnderTest) -> Seen:
    limits = "[supervisor]\ndrain_timeout_s = 0.2\nstop_timeout_s = 2"
    target.serve({"m": target.models.slow}, limits)
    stream = target.stream("m")
    began_at_s = time.monotonic()
    target.corral.ok("stop", "m")
    yield within(3, since(began_at_s), "stopped")
    yield "its stream ends in an error event", f"its stream {ending(stream)}"


@PROCESS.add(6, "engine exits with 0 on its own")
def _(target: DaemonUnderTest) -> Seen:
    target.serve({"m": target.models.tiny})
    before = target.pid("m.0")
    # Its stdin is our pipe; through /proc a second writer can be opened.
    Path(f"/proc/{before}/fd/0").write_bytes(b"cmd_router_to_child:exit\n")
    yield "ready again", target.ready_again("m.0", before)
    (exit_event,) = target.events("instance.exited")
    yield "exit code 0", f"exit code {exit_event['code']}"


@PROCESS.add(7, "engine with a child of its own is killed", quick=True)
def _(target: DaemonUnderTest) -> Seen:
    engine = target.write_engine('sleep 600 &\nexec $ENGINE "$@"')
    target.serve({"m": target.models.tiny}, f'engine = "{engine}"')
    before = target.pid("m.0")
    (child,) = psutil.Process(before).children()
    kill(before)
    yield "its child is gone", f"its child is {gone(child.pid)}"
    yield "ready again", target.ready_again("m.0", before)


@PROCESS.add(8, "daemon killed")
def _(target: DaemonUnderTest) -> Seen:
    target.serve({"m": target.models.tiny}, after="replicas = 2")
    kill(target.corral.daemon_pid)
    yield within(2, until(lambda: not target.corral.engines()), "engines gone")
    target.corral.ok("start")
    yield "the next start works", "the next start works" if target.ask("m") == "answered" else "no"


@PROCESS.add(9, "daemon stopped for a while and continued")
def _(target: DaemonUnderTest) -> Seen:
    target.serve({"m": target.models.tiny}, after="replicas = 2")
    before = [target.pid("m.0"), target.pid("m.1")]
    daemon = psutil.Process(target.corral.daemon_pid)
    daemon.suspend()
    time.sleep(8)  # more than two intervals of any watch: the fault is the time that passes
    daemon.resume()
    yield "answered", target.ask("m")
    after = [target.pid("m.0"), target.pid("m.1")]
    yield "same engines", "same engines" if after == before else f"{before} became {after}"


@PROCESS.add(10, "daemon terminated three times")
def _(target: DaemonUnderTest) -> Seen:
    target.configure({"m": target.models.slow})
    daemon = target.corral.serve()
    stream = target.stream("m")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        # Each is heard before the next is sent, or two would be one.
        daemon.send_signal(number)
        until(lambda: daemon.poll() is not None or target.client.status().stopping)
    began_at_s = time.monotonic()
    daemon.wait(10)
    yield within(3, since(began_at_s), "gone")
    yield "its stream ends in an error event", f"its stream {ending(stream)}"


@PROCESS.add(11, "settings broken, then SIGHUP and corral reload")
def _(target: DaemonUnderTest) -> Seen:
    target.serve({"m": target.models.tiny})
    before, daemon = target.pid("m.0"), target.corral.daemon_pid
    target.configure({"m": target.models.tiny}, after="replica = 3")
    psutil.Process(daemon).send_signal(signal.SIGHUP)
    until(lambda: target.events("settings.rejected") or not is_alive(daemon))
    (refusal,) = target.events("settings.rejected")
    yield "SIGHUP is refused for replica", f"SIGHUP is refused for {_named(str(refusal['reason']))}"
    refused = target.corral("reload")
    yield "reload exits with 78", f"reload exits with {refused.returncode}"
    yield "and names replica", f"and names {_named(refused.stderr)}"
    yield "same daemon", "same daemon" if is_alive(daemon) else "daemon gone"
    yield "same engine", "same engine" if target.pid("m.0") == before else "another engine"
    yield "answered", target.ask("m")


def _named(text: str) -> str:
    return "replica" if "models.m.replica is unknown" in text else text


@PROCESS.add(12, "Ctrl-C at each phase of a start", quick=True)
def _(target: DaemonUnderTest) -> Seen:
    target.configure({"m": target.models.tiny})
    socket = target.root / "run" / "control.sock"
    phases = {
        "at once": lambda: True,
        "listening": socket.exists,
        "loading": target.corral.engines,
        "ready": lambda: target.corral.is_running() and target.instance("m.0").state == "ready",
    }
    for name, is_reached in phases.items():
        daemon = target.corral.serve(until_ready=False)
        until(is_reached)
        daemon.send_signal(signal.SIGINT)
        daemon.wait(10)
        until(lambda: not target.corral.engines())
        yield f"{name}: none left", f"{name}: none left"


@PROCESS.add(13, "ten restarts")
def _(target: DaemonUnderTest) -> Seen:
    target.serve({"m": target.models.tiny})
    kept = restart_often(target, 10)
    yield "0 zombies", f"{kept.zombies} zombies"
    yield "0 files more", f"{kept.files_after - kept.files_before} files more"


@PROCESS.add(14, "state file names a recycled pid")
def _(target: DaemonUnderTest) -> Seen:
    stranger = subprocess.Popen(["/bin/sleep", "60"])
    try:
        (target.root / "run").mkdir(mode=0o700)
        state = target.root / "run" / "daemon.json"
        write_owner(state, DaemonInfo(stranger.pid, 1.0, "0", "http://127.0.0.1:1"))
        target.serve({"m": target.models.tiny})
        daemon = target.client.status().pid
        replaced = target.corral.daemon_pid == daemon
        yield "replaced", "replaced" if replaced else "not replaced"
        target.corral.ok("stop")
        yield "stranger lives", "stranger lives" if stranger.poll() is None else "stranger killed"
    finally:
        stranger.kill()
        stranger.wait()


@PROCESS.add(15, "second daemon in the same directory")
def _(target: DaemonUnderTest) -> Seen:
    target.serve({"m": target.models.tiny})
    refused = target.corral("serve")
    yield "exits with 69", f"exits with {refused.returncode}"
    named = f"pid {target.corral.daemon_pid}" in refused.stderr
    yield "names the owner", "names the owner" if named else refused.stderr
    yield "the first answers", "the first answers" if target.ask("m") == "answered" else "no"


@PROCESS.add(16, "engine removed, then one instance dies")
def _(target: DaemonUnderTest) -> Seen:
    engine = target.write_engine('exec $ENGINE "$@"')
    target.serve({"a": target.models.tiny, "b": target.models.tiny}, f'engine = "{engine}"')
    other = target.pid("b.0")
    engine.unlink()
    kill(target.pid("a.0"))
    yield "failed: engine_missing", target.state_of("a.0", "failed")
    yield "others continue", "others continue" if target.pid("b.0") == other else "others restarted"
    target.write_engine('exec $ENGINE "$@"')
    target.corral.ok("start", "a")
    yield "put back, it starts", "put back, it starts" if target.ask("a") == "answered" else "no"
