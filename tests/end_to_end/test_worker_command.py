"""`corral worker` as a user runs it."""

from __future__ import annotations

import signal

import pytest
from support.corral_cli import CorralCli
from support.instance_harness import is_gone
from support.running_worker import running_worker


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_seed_000_a_worker_prints_its_address_and_ends_at_a_signal(
    corral: CorralCli, how: signal.Signals
) -> None:
    with running_worker(corral) as worker:
        assert worker.address.startswith("127.0.0.1:")
        server = worker.server.pid
        worker.process.send_signal(how)
        assert worker.process.wait(60) == 0
        assert is_gone(server)


def test_seed_000_a_worker_dies_with_its_supervisor(corral: CorralCli) -> None:
    with running_worker(corral) as worker:
        server = worker.server.pid
        worker.kill()
        assert is_gone(server)


def test_a_worker_that_cannot_listen_says_why(corral: CorralCli) -> None:
    with running_worker(corral) as worker:
        failed = corral("worker", "--port", worker.address.rpartition(":")[2])
    assert failed.returncode == 1
    assert f"cannot listen on {worker.address}: address already in use" in failed.stderr


def test_seed_000_no_worker_listens_on_all_addresses(corral: CorralCli) -> None:
    failed = corral("worker", "--host", "0.0.0.0")  # noqa: S104 (it is refused)
    assert failed.returncode == 78
    assert "no authentication and no encryption" in failed.stderr
