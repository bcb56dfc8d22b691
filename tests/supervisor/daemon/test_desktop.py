"""Which host is the last one."""

import math

import pytest

from supervisor.daemon.desktop import STARTER, DesktopHosts
from supervisor.errors import DaemonStopping


@pytest.fixture
def ends() -> list[str]:
    return []


@pytest.fixture
def hosts(ends: list[str]) -> DesktopHosts:
    return DesktopHosts(lambda *_, **__: None, lambda: ends.append("end"))


def test_the_last_host_to_leave_ends_the_daemon(hosts: DesktopHosts, ends: list[str]) -> None:
    with hosts.join() as first, hosts.join() as second:
        hosts.leave(STARTER)
        hosts.leave(second)
        assert ends == []
        hosts.leave(first)
        assert ends == ["end"]
    assert ends == ["end"]


def test_a_starter_that_dies_before_it_joined_is_the_last_one(
    hosts: DesktopHosts, ends: list[str]
) -> None:
    hosts.leave(STARTER)
    assert ends == ["end"]


def test_requests_may_finish_unless_the_last_host_was_killed(hosts: DesktopHosts) -> None:
    with hosts.join() as first, hosts.join() as second:
        hosts.lose(STARTER)
        hosts.lose(second)
        hosts.leave(first)
    assert hosts.drain_max_s > 0


def test_requests_end_with_the_last_host_if_it_was_killed(hosts: DesktopHosts) -> None:
    with hosts.join() as first, hosts.join():
        hosts.lose(STARTER)
        hosts.leave(first)
    assert hosts.drain_max_s == 0


def test_a_daemon_that_is_kept_outlives_its_hosts(hosts: DesktopHosts, ends: list[str]) -> None:
    with hosts.join():
        hosts.lose(STARTER)
        hosts.keep()
    assert ends == []
    assert hosts.drain_max_s == math.inf


def test_no_host_joins_a_daemon_that_is_ending(hosts: DesktopHosts) -> None:
    hosts.leave(STARTER)
    with pytest.raises(DaemonStopping), hosts.join():
        pass
    with pytest.raises(DaemonStopping):
        hosts.keep()
    assert hosts.is_empty
