import asyncio
import os
import resource
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from support.corral_cli import PATIENCE_S, until
from support.instance_harness import descriptors, is_gone, launch_of

from supervisor.engine.child import Child, Exit
from supervisor.engine.launch import Launch

DAEMON = """
import asyncio, sys
from pathlib import Path
from support.instance_harness import fake_launch
from supervisor.engine.child import Child

async def main():
    child = Child.spawn(fake_launch(Path(sys.argv[1]), *sys.argv[2:]))
    def hear(chunk):
        if b"listening" in chunk:
            print("ready", flush=True)
    print(child.pid, flush=True)
    await child.wait(lambda chunk: None, hear)

asyncio.run(main())
"""


def shell(runtime: Path, script: str) -> Launch:
    return launch_of("/bin/sh", "-c", script, runtime=runtime)


async def ears(child: Child) -> tuple[Exit, bytes, bytes]:
    """Keep a child; return how it ended, and its output."""
    out, err = bytearray(), bytearray()
    how = await child.wait(out.extend, err.extend)
    return how, bytes(out), bytes(err)


async def test_both_outputs_are_heard_to_the_end(runtime: Path) -> None:
    """Seed 002: stdout and stderr are read."""
    how, out, err = await ears(Child.spawn(shell(runtime, "echo out; echo err >&2; exit 3")))
    assert (how, out, err) == (Exit(3), b"out\n", b"err\n")
    assert (how.code, how.signal) == (3, None)


async def test_an_end_by_signal_is_told_as_one(runtime: Path) -> None:
    how, _, _ = await ears(Child.spawn(shell(runtime, "kill -SEGV $$")))
    assert (how.code, how.signal) == (None, signal.SIGSEGV)


@pytest.mark.parametrize("is_blocked", [False, True])
async def test_a_child_that_blocks_sigterm_outlives_it(runtime: Path, *, is_blocked: bool) -> None:
    launch = replace(shell(runtime, "kill -TERM $$; exit 3"), blocks_sigterm=is_blocked)
    how, _, _ = await ears(Child.spawn(launch))
    assert (how.code, how.signal) == ((3, None) if is_blocked else (None, signal.SIGTERM))


async def test_what_is_said_comes_in_on_stdin_until_we_hang_up(runtime: Path) -> None:
    child = Child.spawn(shell(runtime, "cat"))
    child.write_line(b"hello\n")
    child.close_stdin()
    child.write_line(b"too late\n")
    assert await ears(child) == (Exit(0), b"hello\n", b"")


async def test_saying_something_to_the_dead_is_no_error(runtime: Path) -> None:
    child = Child.spawn(shell(runtime, "exec <&-; echo deaf; cat /dev/zero"))

    def hear(chunk: bytes) -> None:
        child.write_line(b"hello\n")
        child.signal(signal.SIGKILL)

    assert await child.wait(hear, hear) == Exit(-9)
    child.signal(signal.SIGTERM)
    child.close_stdin()


async def test_a_program_that_cannot_be_run_raises(runtime: Path) -> None:
    launch = replace(shell(runtime, ""), argv=(str(runtime / "nowhere"),))
    with pytest.raises(FileNotFoundError):
        Child.spawn(launch)


async def test_a_child_that_cannot_be_held_is_not_left(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(pid: int) -> int:
        pids.append(pid)
        raise OSError(24, "Too many open files")

    pids: list[int] = []
    launch = shell(runtime, "cat")
    with monkeypatch.context() as full:
        full.setattr(os, "pidfd_open", refuse)
        with pytest.raises(OSError, match="Too many"):
            Child.spawn(launch)
    assert is_gone(pids[0])


async def test_it_is_the_leader_of_its_own_session(runtime: Path) -> None:
    child = Child.spawn(shell(runtime, "cat"))
    assert os.getsid(child.pid) == child.pid != os.getsid(0)
    child.close_stdin()
    await ears(child)


async def test_whoever_it_left_behind_in_its_group_dies_with_it(runtime: Path) -> None:
    child = Child.spawn(shell(runtime, "sleep 600 & echo $!"))
    how, out, _ = await ears(child)
    assert how == Exit(0)
    assert is_gone(int(out))


async def test_a_process_that_left_the_group_with_the_pipes_delays_nothing(runtime: Path) -> None:
    child = Child.spawn(shell(runtime, "setsid sleep 600 & echo $!; sleep 0.1"))
    _, out, _ = await ears(child)
    os.kill(int(out), signal.SIGKILL)


@pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="the kernel does not tell how long it waits"
)
async def test_waiting_for_a_processor_counts_as_running(runtime: Path) -> None:
    script = "import os, sys; os.sched_setaffinity(0, [int(sys.argv[1])])\nwhile True: pass"
    processor = str(min(os.sched_getaffinity(0)))
    launch = launch_of(sys.executable, "-c", script, processor, runtime=runtime)
    children = [Child.spawn(launch) for _ in range(2)]
    async with asyncio.TaskGroup() as group:
        ends = [group.create_task(ears(child)) for child in children]
        await asyncio.to_thread(until, lambda: runs_beyond_its_processor_time(children[0]))
        for end in ends:
            end.cancel()


def runs_beyond_its_processor_time(child: Child) -> bool:
    time = child.processor_time()
    assert time is not None
    return time.used_s > 0.1 and time.waited_s > 0.2 * time.used_s


async def test_cancelling_kills_and_reaps(runtime: Path) -> None:
    child = Child.spawn(shell(runtime, "trap '' TERM; echo up; cat"))
    up = asyncio.Event()
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        task = group.create_task(child.wait(lambda _: up.set(), lambda _: None))
        await up.wait()
        task.cancel()
    assert not psutil.pid_exists(child.pid)


async def test_a_flood_is_swallowed_and_blocks_nobody(runtime: Path) -> None:
    child = Child.spawn(shell(runtime, "head -c 200000000 /dev/zero"))
    sizes: list[int] = []
    turns = 0
    turn_of_chunk: list[int] = []

    def note(chunk: bytes) -> None:
        sizes.append(len(chunk))
        turn_of_chunk.append(turns)

    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        task = group.create_task(child.wait(note, print))
        while not task.done():
            await asyncio.sleep(0)
            turns += 1
    assert sum(sizes) == 200_000_000
    # Others have their turn between two chunks, or each pipe's.
    assert max(Counter(turn_of_chunk).values()) <= 2


async def test_it_leaves_no_core_behind(runtime: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    try:
        child = Child.spawn(shell(runtime, "grep 'core file size' /proc/self/limits"))
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
    _, out, _ = await ears(child)
    assert out.split()[4] == (b"1" if hard else b"0")


@pytest.mark.parametrize(
    ("returncode", "is_crash"),
    [
        (-signal.SIGSEGV, True),
        (-signal.SIGABRT, True),
        (-signal.SIGKILL, True),
        (128 + signal.SIGSEGV, True),  # as a shell tells it
        (-signal.SIGTERM, False),
        (-signal.SIGINT, False),
        (128 + signal.SIGTERM, False),
        (0, False),
        (1, False),
        (128, False),
        (255, False),
    ],
)
def test_a_crash_is_a_signal_that_does_not_ask_to_leave(
    returncode: int,
    is_crash: bool,  # noqa: FBT001 (a parameter)
) -> None:
    assert Exit(returncode).is_crash is is_crash


async def test_fifty_children_leave_no_zombie_and_no_descriptor(runtime: Path) -> None:
    launch = shell(runtime, "exit 0")
    await ears(Child.spawn(launch))
    before = descriptors()
    for _ in range(50):
        await ears(Child.spawn(launch))
    assert descriptors() == before
    assert not [c for c in psutil.Process().children() if c.status() == psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    "fault", ["silent-load", "slow-load=600", "ignore-sigterm", "no-child-mode"]
)
def test_when_the_daemon_is_killed_no_engine_is_left(runtime: Path, fault: str) -> None:
    """Whether it loads, serves, or is deaf to everything."""
    daemon = subprocess.Popen(
        [sys.executable, "-c", DAEMON, str(runtime), fault],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert daemon.stdout
    engine = int(daemon.stdout.readline())
    if "load" not in fault:
        assert daemon.stdout.readline() == b"ready\n"
    daemon.kill()
    daemon.communicate()
    assert is_gone(engine)
