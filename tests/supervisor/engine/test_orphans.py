"""Engines without a daemon, started by hand: which are ended, and which are nobody's business."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.instance_harness import FAKE, is_gone

from supervisor.engine import orphans
from supervisor.engine.launch import PROCESS_TAG_ENV, process_tag
from supervisor.engine.orphans import kill_orphans, prove
from supervisor.events import Event, EventStream
from supervisor.system import daemon_lock

PYTHON = Path(sys.executable)
# Starts a program in a session of its own, tells its pid and is gone: nobody is its parent then.
ORPHAN = """
import subprocess, sys
own, *argv = sys.argv[1:]
quiet = subprocess.DEVNULL
own = own == "y"
child = subprocess.Popen(argv, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=own)
print(child.pid)
"""

Orphan = Callable[..., int]


@pytest.fixture
def orphan(runtime: Path) -> Iterator[Orphan]:
    """Return a function that starts a fake engine without a parent, which outlives its starter."""
    pids = []

    def start(*failures: str, marker: str | None, own_session: bool = True) -> int:
        switches = [word for fault in failures for word in ("--fault", fault)]
        engine = [str(PYTHON), str(FAKE), "--host", str(runtime / "chat.0.sock"), *switches]
        done = subprocess.run(
            [str(PYTHON), "-c", ORPHAN, "y" if own_session else "n", *engine],
            env={"PATH": os.environ["PATH"]} | ({PROCESS_TAG_ENV: marker} if marker else {}),
            stdout=subprocess.PIPE,
            check=True,
        )
        pids.append(int(done.stdout))
        return pids[-1]

    yield start
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def ours(runtime: Path, program: Path = PYTHON) -> str:
    return process_tag(runtime, "chat.0", program)


def reaped(runtime: Path) -> tuple[list[int], list[Event]]:
    events: list[Event] = []
    found = kill_orphans(runtime, EventStream(events.append).emit)
    return [pid for pid, _, _ in found], events


@pytest.mark.parametrize("has_pidfd", [True, False])
@pytest.mark.parametrize("fault", ["no-child-mode", "ignore-sigterm"])
def test_an_engine_of_a_dead_daemon_is_ended_and_told(
    runtime: Path, orphan: Orphan, fault: str, *, has_pidfd: bool
) -> None:
    pid = orphan(fault, marker=ours(runtime))
    with pytest.MonkeyPatch.context() as patch:
        if not has_pidfd:
            # Not os.pidfd_open: psutil remembers from its first wait whether it is there.
            patch.setattr(daemon_lock, "_open_pidfd", lambda _: None)
        pids, events = reaped(runtime)
    assert pids == [pid]
    assert is_gone(pid)
    assert [(event.name, event.fields["instance"], event.fields["pid"]) for event in events] == [
        ("engine.orphan_killed", "chat.0", pid)
    ]
    assert reaped(runtime) == ([], [])


def test_a_stopped_one_is_ended_too(runtime: Path, orphan: Orphan) -> None:
    pid = orphan("no-child-mode", marker=ours(runtime))
    os.kill(pid, signal.SIGSTOP)
    assert reaped(runtime)[0] == [pid]
    assert is_gone(pid)


@pytest.mark.parametrize(
    "marker",
    [
        None,
        "1",
        ours(Path("/run/user/another")),
        "chat.0",
    ],
)
def test_an_engine_that_is_not_of_this_runtime_directory_is_left_alone(
    runtime: Path, orphan: Orphan, marker: str | None
) -> None:
    pid = orphan("no-child-mode", marker=marker)
    assert reaped(runtime) == ([], [])
    assert not is_gone(pid, within_s=0)


def test_another_program_that_inherited_the_marker_is_left_alone(
    runtime: Path, orphan: Orphan
) -> None:
    pid = orphan("no-child-mode", marker=ours(runtime, Path("/opt/llama-server")))
    assert reaped(runtime) == ([], [])
    assert not is_gone(pid, within_s=0)


def test_one_that_does_not_lead_its_session_is_left_alone(runtime: Path, orphan: Orphan) -> None:
    pid = orphan("no-child-mode", marker=ours(runtime), own_session=False)
    assert reaped(runtime) == ([], [])
    assert not is_gone(pid, within_s=0)


def test_a_child_of_our_own_is_no_stray(runtime: Path) -> None:
    with subprocess.Popen(
        [str(PYTHON), "-c", "input()"],
        stdin=subprocess.PIPE,
        env={PROCESS_TAG_ENV: ours(runtime)},
        start_new_session=True,
    ) as child:
        assert prove(child.pid, runtime) is None
        child.communicate(b"\n")


def test_a_process_that_is_gone_or_of_somebody_else_proves_nothing(runtime: Path) -> None:
    with subprocess.Popen(["/bin/true"]) as gone:
        gone.wait()
    assert prove(gone.pid, runtime) is None
    assert prove(1, runtime) is None


def test_a_number_that_changed_hands_before_the_signal_is_not_signalled(
    runtime: Path, orphan: Orphan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second proof, taken while the process is held, decides."""
    pid = orphan("no-child-mode", marker=ours(runtime))
    proofs = iter([(pid, "chat.0", datetime.now(UTC)), None])
    monkeypatch.setattr(
        orphans, "prove", lambda found, _: next(proofs, None) if found == pid else None
    )
    assert reaped(runtime) == ([], [])
    assert not is_gone(pid, within_s=0)


def test_a_process_gone_before_it_could_be_held_is_nothing(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with subprocess.Popen(["/bin/true"]) as gone:
        gone.wait()
    monkeypatch.setattr("psutil.pids", lambda: [gone.pid])
    monkeypatch.setattr(orphans, "prove", lambda pid, _: (pid, "chat.0", datetime.now(UTC)))
    assert reaped(runtime) == ([], [])


def test_a_tag_has_a_line_for_each_part() -> None:
    tag = process_tag(Path("/run/user/1/llama-corral"), "chat.0~2", "/opt/a b/llama-server")
    assert tag.split("\n") == ["/run/user/1/llama-corral", "chat.0~2", "/opt/a b/llama-server"]
