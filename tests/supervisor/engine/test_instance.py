import asyncio
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.corral_cli import PATIENCE_S
from support.instance_harness import (
    InstanceHarness,
    descriptors,
    fake_launch,
    is_gone,
    launch_of,
    loading,
    quick,
    zombies,
)

from proxy.router.lease import Activity
from supervisor.engine import instance as engine_instance
from supervisor.engine.instance import Instance
from supervisor.engine.launch import Launch
from supervisor.engine.states import State
from supervisor.errors import EngineMissing
from supervisor.settings.tables import RestartPolicy
from supervisor.system.limits import OomKillWatch

UP = frozenset({State.READY})
DOWN = frozenset({State.STOPPED})
WAITING = frozenset({State.BACKOFF})
FAILED = frozenset({State.FAILED})
ONCE = RestartPolicy(max_failures=1)
EAGER = RestartPolicy(backoff_initial_s=1e-6, backoff_max_s=1e-6, max_failures=1000)


async def test_an_instance_starts_warms_serves_and_stops(runtime: Path) -> None:
    """Seed 002: a warm-up request before it is ready."""
    harness = InstanceHarness(fake_launch(runtime))
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(UP)
        assert (facts.run, facts.wanted, facts.load_progress) == (1, True, None)
        instance.stop()
        facts = await instance.wait(DOWN)
    assert harness.story == ["starting", "warming", "ready", "draining", "stopping", "stopped"]
    assert harness.traffic.calls == ["admit", "withdraw", "idle", "close"]
    assert (facts.pid, facts.cause, facts.up_s) == (None, None, 0)
    assert not (runtime / "chat.0.sock").exists()


async def test_load_progress_is_reported(runtime: Path) -> None:
    harness = InstanceHarness(fake_launch(runtime, "slow-load=0.4"))
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        await instance.wait(UP)
    emitted = [
        fields["value"] for name, fields in harness.events if name == "instance.load_progress"
    ]
    assert emitted == [0, 0.25, 0.5, 0.75]


async def test_load_progress_is_reset_on_restart(runtime: Path) -> None:
    harness = InstanceHarness(fake_launch(runtime, "slow-load=0.4"))
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(UP)
        assert facts.pid
        assert facts.load_progress
        os.kill(facts.pid, signal.SIGKILL)
        assert (await instance.wait(WAITING)).load_progress is None
        assert (await instance.wait(frozenset({State.STARTING}))).load_progress is None


async def test_an_old_build_without_child_mode_is_found_ready_and_stopped(runtime: Path) -> None:
    harness = InstanceHarness(fake_launch(runtime, "no-child-mode"))
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        await instance.wait(UP)
        instance.stop()
        await instance.wait(DOWN)
    exits = [fields for name, fields in harness.events if name == "instance.exited"]
    assert [(ended["code"], ended["signal"]) for ended in exits] == [(0, None)]


async def test_over_tcp_the_port_is_learnt_from_the_engine(runtime: Path) -> None:
    harness = InstanceHarness(fake_launch(runtime, port=0))
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(UP)
    assert facts.endpoint.port > 0


async def test_a_foreign_server_without_a_key_is_not_accepted(runtime: Path) -> None:
    limits = quick(load_timeout_s=0.5)
    harness = InstanceHarness(fake_launch(runtime, "no-key"), limits=limits, policy=ONCE)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(FAILED)
    assert facts.cause
    assert facts.cause.code == "load_stalled"
    assert "warming" not in harness.story


async def test_commands_without_effect_emit_no_event(runtime: Path) -> None:
    harness = InstanceHarness(fake_launch(runtime))
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.stop()
        instance.start()
        await instance.wait(UP)
        instance.start()
    assert harness.story[:4] == ["starting", "warming", "ready", "draining"]


async def test_a_stop_before_the_spawn_is_clean(runtime: Path) -> None:
    harness = InstanceHarness(fake_launch(runtime))
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        await asyncio.sleep(0)
        instance.start()
        instance.stop()
        facts = await instance.wait(DOWN)
    assert facts.run == 1


async def test_a_command_before_serve_is_applied(runtime: Path) -> None:
    harness = InstanceHarness(fake_launch(runtime))
    harness.instance.start()
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        await instance.wait(UP)


async def test_cancelling_leaves_no_process_and_a_stopped_instance(runtime: Path) -> None:
    harness = InstanceHarness(fake_launch(runtime, "ignore-sigterm"))
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(UP)
    assert facts.pid
    with pytest.raises(ProcessLookupError):
        os.kill(facts.pid, 0)
    assert harness.instance.snapshot().state is State.STOPPED
    assert "withdraw" in harness.traffic.calls


async def test_a_drain_waits_for_requests_and_can_be_cancelled(runtime: Path) -> None:
    harness = InstanceHarness(fake_launch(runtime))
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        await instance.wait(UP)
        harness.traffic.busy.clear()
        instance.stop()
        await asyncio.sleep(0)
        assert instance.snapshot().state is State.DRAINING
        instance.start()
        assert (await instance.wait(UP)).run == 1
    steps = [call for call in harness.traffic.calls if call != "idle"]
    assert steps[:3] == ["admit", "withdraw", "admit"]


async def test_a_drain_beyond_its_limit_is_aborted(runtime: Path) -> None:
    harness = InstanceHarness(fake_launch(runtime), limits=quick(drain_timeout_s=0.05))
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        await instance.wait(UP)
        harness.traffic.busy.clear()
        instance.stop()
        await instance.wait(DOWN)
    assert harness.traffic.calls[-1] == "close"


async def test_restart_starts_a_new_process(runtime: Path) -> None:
    harness = InstanceHarness(fake_launch(runtime))
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        before = await instance.wait(UP)
        instance.restart()
        await instance.wait(frozenset({State.STARTING}))
        after = await instance.wait(UP)
    assert (after.run, after.restarts, after.failures) == (2, 1, 0)
    assert after.pid != before.pid


async def test_a_crash_while_serving_is_followed_by_a_restart(runtime: Path) -> None:
    harness = InstanceHarness(fake_launch(runtime))
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(UP)
        assert facts.pid
        os.kill(facts.pid, signal.SIGSEGV)
        waiting = await instance.wait(WAITING)
        assert waiting.cause
        assert waiting.cause.code == "memory_fault"
        facts = await instance.wait(UP)
    assert (facts.run, facts.restarts, facts.failures, facts.cause) == (2, 1, 1, None)


async def test_crashes_close_together_end_in_failed_and_start_forgets_them(runtime: Path) -> None:
    policy = RestartPolicy(backoff_initial_s=0.001, backoff_max_s=0.001, max_failures=2)
    harness = InstanceHarness(fake_launch(runtime, "exit-after-ready"), policy=policy)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(FAILED)
        assert (facts.run, facts.failures) == (2, 2)
        harness.launch = fake_launch(runtime)
        instance.start()
        assert (await instance.wait(UP)).failures == 0
    failed = [fields for name, fields in harness.events if name == "instance.failed"]
    assert [entry["log"] for entry in failed] == [str(runtime / "chat.0.log")]


async def test_a_permanent_cause_fails_at_once_and_is_in_the_log(runtime: Path) -> None:
    harness = InstanceHarness(fake_launch(runtime, "crash-at-start"))
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(FAILED)
    assert (facts.run, facts.cause and facts.cause.code) == (1, "model_missing")
    assert facts.log_path
    text = facts.log_path.read_text()
    assert text.startswith("[llama-corral: run 1, ")
    assert "failed to open GGUF file" in text


async def test_silence_while_loading_is_a_failure(runtime: Path) -> None:
    """Seed 002: not ready in time."""
    limits = quick(load_timeout_s=0.3)
    harness = InstanceHarness(fake_launch(runtime, "silent-load"), limits=limits, policy=ONCE)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(FAILED)
    assert facts.cause
    assert facts.cause.code == "load_stalled"
    assert harness.story[:3] == ["starting", "stopping", "failed"]


async def test_slow_loading_with_output_is_not_a_failure(runtime: Path) -> None:
    limits = quick(load_timeout_s=0.6)
    harness = InstanceHarness(fake_launch(runtime, "slow-load=1.5"), limits=limits)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        assert (await instance.wait(UP | FAILED | WAITING)).state is State.READY


@pytest.mark.parametrize("fault", ["slow-load=600", "silent-load"])
async def test_stopping_while_it_loads_takes_no_time(runtime: Path, fault: str) -> None:
    harness = InstanceHarness(fake_launch(runtime, fault))
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        await loading(instance)
        instance.stop()
        await instance.wait(DOWN)


async def test_an_engine_that_ignores_signals_is_killed(runtime: Path) -> None:
    """Seed 002: shutdown: SIGTERM, then SIGKILL."""
    limits = quick(stop_timeout_s=0.2)
    harness = InstanceHarness(fake_launch(runtime, "ignore-sigterm"), limits=limits)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        await instance.wait(UP)
        instance.stop()
        facts = await instance.wait(DOWN)
    assert harness.story[-4:] == ["draining", "stopping", "killing", "stopped"]
    assert facts.cause is None


async def test_an_engine_without_completions_becomes_ready(runtime: Path) -> None:
    harness = InstanceHarness(fake_launch(runtime, "no-completion"))
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        await instance.wait(UP)
    assert harness.story[:3] == ["starting", "warming", "ready"]


async def test_an_engine_that_fails_its_warm_up_gets_no_requests_until_healthy(
    runtime: Path,
) -> None:
    """Seed 002: a failed warm-up."""
    harness = InstanceHarness(fake_launch(runtime, "sick"))
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        await instance.wait(UP)
    assert harness.story[:4] == ["starting", "warming", "unhealthy", "ready"]
    assert harness.traffic.calls[0] == "admit"


async def test_an_unhealthy_instance_is_out_of_service_until_it_answers(runtime: Path) -> None:
    """Seed 002: health."""
    harness = InstanceHarness(fake_launch(runtime, "fails-once"))
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        await instance.wait(UP)
        await harness.fail_probe()
        await instance.wait(UP)
    assert harness.traffic.calls[:3] == ["admit", "withdraw", "admit"]


async def test_an_overdue_instance_is_replaced_without_a_failure(
    runtime: Path,
) -> None:
    harness = InstanceHarness(fake_launch(runtime))
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(UP)
        harness.traffic.busy.clear()
        instance.mark_overdue(facts.run - 1, "still computes")
        assert instance.snapshot().state is State.READY
        instance.mark_overdue(facts.run, "still computes")
        assert instance.snapshot().state is State.DRAINING  # its requests go on
        harness.traffic.busy.set()
        again = await instance.wait(UP)
    assert (again.run, again.failures, again.cause) == (facts.run + 1, 0, None)
    assert "still computes" in [fields.get("reason") for _, fields in harness.events]


async def test_requests_of_an_overdue_engine_are_aborted_when_only_its_cpu_time_grows(
    runtime: Path,
) -> None:
    harness = InstanceHarness(
        fake_launch(runtime, "spins"), limits=quick(liveness_interval_s=0.4, idle_probe_s=0)
    )
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(UP)
        harness.traffic.busy.clear()
        harness.traffic.now = Activity(in_flight=1, awaiting_upstream=1)
        instance.mark_overdue(facts.run, "still computes")
        assert (await instance.wait(UP)).run == 2
    assert harness.steps[:2] == ["withdrawn 1", "requests_aborted 1"]


async def test_an_instance_that_stays_unhealthy_is_replaced(runtime: Path) -> None:
    limits = quick(liveness_interval_s=0.4, unhealthy_timeout_s=0.2, stop_timeout_s=0.1)
    harness = InstanceHarness(fake_launch(runtime), limits=limits)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(UP)
        assert facts.pid
        os.kill(facts.pid, signal.SIGSTOP)
        waiting = await instance.wait(WAITING)
        assert waiting.cause
        assert waiting.cause.code == "unresponsive"
        assert (await instance.wait(UP)).run == 2


@pytest.mark.parametrize("fault", ["", "wedged"])
async def test_a_silent_engine_is_withdrawn_and_replaced_while_clients_wait(
    runtime: Path, fault: str
) -> None:
    """Stopped by a signal, or answering that all is well: nothing moves in either."""
    limits = quick(stop_timeout_s=0.1, liveness_interval_s=0.4, idle_probe_s=0)
    harness = InstanceHarness(fake_launch(runtime, *filter(None, [fault])), limits=limits)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(UP)
        assert facts.pid
        harness.traffic.now = Activity(in_flight=2, awaiting_upstream=1)
        if not fault:
            os.kill(facts.pid, signal.SIGSTOP)
        await instance.wait(frozenset({State.UNHEALTHY}))
        waiting = await instance.wait(WAITING)
        assert waiting.cause
        assert waiting.cause.code == "unresponsive"
        assert (await instance.wait(UP)).run == 2
    how = "exit line" if fault else "SIGKILL"  # a stopped one reads no line
    assert harness.steps[:3] == ["withdrawn 2", "requests_aborted 2", how]


async def test_an_idle_engine_that_is_stopped_is_replaced_without_a_probe(runtime: Path) -> None:
    limits = quick(liveness_interval_s=0.2, idle_probe_s=0, unhealthy_timeout_s=3600)
    harness = InstanceHarness(fake_launch(runtime), limits=limits)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(UP)
        assert facts.pid
        os.kill(facts.pid, signal.SIGSTOP)
        waiting = await instance.wait(WAITING)
        assert waiting.cause
        assert waiting.cause.code == "unresponsive"
        assert (await instance.wait(UP)).run == 2
    assert harness.steps[:2] == ["withdrawn 0", "SIGKILL"]


async def test_an_idle_engine_that_goes_on_in_time_is_kept(
    runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In time on every machine: the next look may come late.
    monkeypatch.setattr(engine_instance, "recovery_timeout_s", lambda *_, **__: PATIENCE_S)
    limits = quick(liveness_interval_s=0.2, idle_probe_s=0)
    harness = InstanceHarness(fake_launch(runtime), limits=limits)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(UP)
        assert facts.pid
        os.kill(facts.pid, signal.SIGSTOP)
        await instance.wait(frozenset({State.UNHEALTHY}))
        os.kill(facts.pid, signal.SIGCONT)
        assert (await instance.wait(UP)).run == 1


async def test_a_drain_does_not_wait_for_an_engine_that_hangs(runtime: Path) -> None:
    limits = quick(stop_timeout_s=0.1, liveness_interval_s=0.4, idle_probe_s=0)
    harness = InstanceHarness(fake_launch(runtime, "wedged"), limits=limits)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        await instance.wait(UP)
        harness.traffic.busy.clear()
        harness.traffic.now = Activity(in_flight=2, awaiting_upstream=1)
        instance.stop()
        await instance.wait(DOWN)
    assert harness.steps[:2] == ["withdrawn 2", "requests_aborted 2"]


async def test_an_unhealthy_engine_that_progresses_is_ready_again(runtime: Path) -> None:
    harness = InstanceHarness(fake_launch(runtime, "fails-once"))
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        await instance.wait(UP)
        await harness.fail_probe()
        harness.traffic.now = Activity(in_flight=1, awaiting_upstream=1)
        await asyncio.sleep(0.3)  # the test is whether it stays unhealthy
        assert instance.snapshot().state is State.UNHEALTHY
        harness.traffic.now = Activity(in_flight=1, awaiting_upstream=1, bytes_received=9)
        assert (await instance.wait(UP)).run == 1


async def test_a_probe_finds_an_idle_engine_that_hangs(runtime: Path) -> None:
    limits = quick(
        unhealthy_timeout_s=0.2,
        stop_timeout_s=0.1,
        liveness_interval_s=0.2,
        idle_probe_s=0.1,
    )
    harness = InstanceHarness(fake_launch(runtime, "wedged"), limits=limits)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        await instance.wait(UP)
        await instance.wait(WAITING)
    assert harness.story[:5] == ["starting", "warming", "ready", "unhealthy", "stopping"]


async def test_an_idle_engine_that_answers_probes_stays_in_service(runtime: Path) -> None:
    limits = quick(liveness_interval_s=0.2, idle_probe_s=0.2)
    harness = InstanceHarness(fake_launch(runtime), limits=limits)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(UP)
        assert facts.log_path
        began_at_s = time.monotonic()
        while facts.log_path.read_text().count("POST /completion") < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert time.monotonic() - began_at_s > 3 * limits.idle_probe_s
        assert instance.snapshot().state is State.READY


async def test_a_refused_probe_makes_the_engine_unhealthy(runtime: Path) -> None:
    limits = quick(liveness_interval_s=0.2, idle_probe_s=0.05)
    harness = InstanceHarness(fake_launch(runtime, "fails-once"), limits=limits)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        await instance.wait(UP)
        await instance.wait(frozenset({State.UNHEALTHY}))
        await instance.wait(UP)
    assert harness.story[:5] == ["starting", "warming", "ready", "unhealthy", "ready"]


async def test_the_steps_of_a_stop_are_logged_in_order(runtime: Path) -> None:
    limits = quick(stop_timeout_s=0.2)
    harness = InstanceHarness(fake_launch(runtime, "ignore-sigterm"), limits=limits)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        await instance.wait(UP)
        instance.stop()
        await instance.wait(DOWN)
    assert harness.steps == ["withdrawn 0", "drained", "exit line", "SIGTERM again", "SIGKILL"]


@pytest.mark.parametrize("in_slurm", [False, True])
async def test_a_requested_exit_is_not_a_failure(runtime: Path, *, in_slurm: bool) -> None:
    launch = replace(fake_launch(runtime, "slow-load=600"), blocks_sigterm=in_slurm)
    harness = InstanceHarness(launch)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        await loading(instance)
        instance.stop()
        await instance.wait(DOWN)
    exits = [fields for name, fields in harness.events if name == "instance.exited"]
    assert [(ended["signal"], ended["fault"]) for ended in exits] == [
        (signal.SIGINT if in_slurm else signal.SIGTERM, False)
    ]


async def test_a_deadline_missed_while_the_loop_was_blocked_is_not_a_failure(runtime: Path) -> None:
    limits = quick(load_timeout_s=0.5)
    harness = InstanceHarness(fake_launch(runtime, "slow-load=2"), limits=limits)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        await loading(instance)
        time.sleep(1.7)  # noqa: ASYNC251 (the test needs the loop to stand still)
        assert (await instance.wait(UP | FAILED | WAITING)).state is State.READY


async def test_the_delay_before_the_next_start_is_reported(runtime: Path) -> None:
    policy = RestartPolicy(backoff_initial_s=1000, backoff_max_s=1000)
    harness = InstanceHarness(fake_launch(runtime, "exit-after-ready"), policy=policy)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        assert (await instance.wait(UP)).retry_in_s is None
        facts = await instance.wait(WAITING)
        assert facts.retry_in_s is not None
        assert 0 <= facts.retry_in_s <= 1000


async def test_forty_restarts_leave_no_zombie_and_no_open_file(runtime: Path) -> None:
    harness = InstanceHarness(launch_of("/bin/false", runtime=runtime), policy=EAGER)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        await run_of(instance, 5)
        before = descriptors()
        await run_of(instance, 45)
        assert descriptors() <= before + 4  # those of the run under way
    assert zombies() == 0


@pytest.mark.parametrize("fault", ["flood-stderr=30000000", "megabyte-line"])
async def test_much_output_neither_blocks_the_engine_nor_fills_the_disk(
    runtime: Path, fault: str
) -> None:
    harness = InstanceHarness(fake_launch(runtime, fault))
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        await instance.wait(UP)
    assert sum(file.stat().st_size for file in runtime.glob("*.log*")) < 64 * 1024**2


async def test_a_grandchild_is_killed_with_the_engine(runtime: Path) -> None:
    harness = InstanceHarness(fake_launch(runtime, "grandchild"))
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(UP)
        instance.stop()
        await instance.wait(DOWN)
    assert facts.log_path
    left = re.search(r"grandchild (\d+)", facts.log_path.read_text())
    assert left
    assert is_gone(int(left[1]))


async def test_a_missing_engine_is_a_cause(runtime: Path) -> None:
    missing = replace(fake_launch(runtime), argv=(str(runtime / "llama-server"),))
    assert await cause_of(missing) == "engine_missing"


async def test_an_engine_that_cannot_be_executed_is_a_cause(runtime: Path) -> None:
    (runtime / "llama-server").touch(mode=0o600)
    launch = launch_of(str(runtime / "llama-server"), runtime=runtime)
    assert await cause_of(launch) == "engine_denied"


async def test_a_log_that_cannot_be_written_is_a_cause(runtime: Path) -> None:
    (runtime / "chat.0.log").mkdir()
    assert await cause_of(fake_launch(runtime)) == "state_denied"


async def test_an_error_of_the_planner_is_a_cause(runtime: Path) -> None:
    harness = InstanceHarness(fake_launch(runtime))
    harness.launch_error = EngineMissing("no llama-server")
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(FAILED)
    assert facts.cause
    assert (facts.cause.code, facts.pid) == ("engine_missing", None)


async def run_of(instance: Instance, number: int) -> None:
    """Wait until a run of this number has ended."""
    while instance.snapshot().run < number:
        await instance.wait(frozenset({State.STARTING}))
        await instance.wait(WAITING)


async def cause_of(launch: Launch) -> str:
    """Return the code of the permanent cause that a launch fails with."""
    harness = InstanceHarness(launch)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(FAILED)
    assert facts.cause
    assert facts.cause.permanent
    return facts.cause.code


def test_repr_does_not_show_the_key(runtime: Path) -> None:
    harness = InstanceHarness(fake_launch(runtime))
    assert repr(harness.instance) == "<Instance chat.0: stopped, run 0>"
    assert "api_key" not in repr(harness.instance.snapshot())


async def crashes(
    runtime: Path, requests: int, count: int, by: signal.Signals = signal.SIGSEGV
) -> tuple[InstanceHarness, str, State]:
    """End an engine by a signal again and again, each time with so many requests.

    Returns:
        The events, and the last cause and state.
    """
    code, state = "", State.STOPPED
    harness = InstanceHarness(
        fake_launch(runtime),
        policy=RestartPolicy(backoff_initial_s=0.01, backoff_max_s=0.01, max_failures=3),
    )
    harness.traffic.computed = requests
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        for run in range(1, count + 1):
            facts = await instance.wait(UP)
            assert (facts.run, facts.cause) == (run, None)
            assert facts.pid
            os.kill(facts.pid, by)
            facts = await instance.wait(WAITING | FAILED)
            assert facts.cause
            code, state = facts.cause.code, facts.state
    return harness, code, state


async def test_crashes_with_requests_never_end_in_failed(runtime: Path) -> None:
    harness, code, state = await crashes(runtime, requests=2, count=5)
    assert (code, state) == ("crashed_at_request", State.BACKOFF)
    assert harness.traffic.ends[:5] == ["crashed"] * 5


async def test_crashes_without_requests_end_in_failed(runtime: Path) -> None:
    _, code, state = await crashes(runtime, requests=0, count=3)
    assert (code, state) == ("memory_fault", State.FAILED)


@pytest.mark.parametrize("requests", [0, 2])
async def test_kills_from_outside_never_end_in_failed(runtime: Path, requests: int) -> None:
    harness, code, state = await crashes(runtime, requests, count=5, by=signal.SIGKILL)
    assert (code, state) == ("killed", State.BACKOFF)
    assert harness.traffic.ends[:5] == ["killed"] * 5


async def test_an_engine_that_is_killed_while_it_drains_harmed_no_request(runtime: Path) -> None:
    harness = InstanceHarness(fake_launch(runtime))
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        facts = await instance.wait(UP)
        assert facts.pid
        harness.traffic.busy.clear()
        instance.restart()
        await instance.wait(frozenset({State.DRAINING}))
        os.kill(facts.pid, signal.SIGKILL)
        await instance.wait(UP)
    assert harness.traffic.ends[0] == "killed"


@pytest.mark.parametrize("requests", [0, 2])
async def test_kills_for_want_of_memory_count_as_before(
    runtime: Path, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OomKillWatch, "has_killed", lambda _: True)
    harness, code, state = await crashes(runtime, requests, count=3, by=signal.SIGKILL)
    is_own = not requests
    assert state is (State.FAILED if is_own else State.BACKOFF)
    assert code == ("killed" if is_own else "crashed_at_request")
    assert harness.traffic.ends[:3] == ["crashed"] * 3


async def test_crashes_with_requests_do_not_count_against_the_engine_itself(runtime: Path) -> None:
    harness = InstanceHarness(
        fake_launch(runtime),
        policy=RestartPolicy(backoff_initial_s=0.01, backoff_max_s=0.01, max_failures=3),
    )
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        for requests in (1, 1, 1, 0, 0):
            facts = await instance.wait(UP)
            assert facts.pid
            harness.traffic.computed = requests
            os.kill(facts.pid, signal.SIGSEGV)
            facts = await instance.wait(WAITING)


async def test_a_killed_engine_did_not_crash(runtime: Path) -> None:
    limits = quick(stop_timeout_s=0.1)
    harness = InstanceHarness(fake_launch(runtime, "ignore-sigterm"), limits=limits)
    async with asyncio.timeout(PATIENCE_S), harness.served() as instance:
        instance.start()
        await instance.wait(UP)
        instance.stop()
        await instance.wait(DOWN)
    assert harness.traffic.ends == ["stopped"]
