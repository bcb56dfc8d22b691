import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.notify_peer import NotifyPeer, abstract_address, path_address

from supervisor.events import Event
from supervisor.service.notifier import (
    ServiceNotifier,
    open_notify_socket,
    take_service_environment,
)

AT = datetime(2026, 11, 21, 9, tzinfo=UTC)
LIMIT_S = 0.2


@pytest.fixture
def systemd() -> Iterator[NotifyPeer]:
    peer = NotifyPeer(abstract_address())
    yield peer
    peer.close()


def notifier_of(systemd: NotifyPeer) -> ServiceNotifier:
    limit_us = str(int(LIMIT_S * 1e6))
    environ = {"NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": limit_us}
    return take_service_environment(environ)


STOPPING = Event("daemon.stopping", AT, {"reason": "a command"})


def entered(state: str) -> Event:
    return Event("instance.state_changed", AT, {"instance": "a.0", "after": state})


def extended_ping(message: dict[str, str]) -> bool:
    return message.keys() >= {"WATCHDOG", "EXTEND_TIMEOUT_USEC"}


@asynccontextmanager
async def served(notifier: ServiceNotifier) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(notifier.serve())
        yield
        task.cancel()


def test_a_service_is_ready_when_it_says_so(systemd: NotifyPeer) -> None:
    notifier = notifier_of(systemd)
    notifier.observe(entered("starting"))
    notifier.note_start()
    status = "0 of 1 instances ready; loading a.0"
    assert systemd.arrived() == [{"STATUS": status}, {"READY": "1"}]


def test_a_message_reaches_a_socket_with_a_path(tmp_path: Path) -> None:
    systemd = NotifyPeer(path_address(tmp_path))
    notifier_of(systemd).note_start()
    assert "READY" in systemd.next()
    systemd.close()
    notifier_of(systemd).note_start()  # without a reader there is no error


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": "vsock:2:1"}, {"NOTIFY_SOCKET": "x"}])
async def test_without_a_service_manager_nothing_is_sent(environ: dict[str, str]) -> None:
    assert open_notify_socket(environ) is None
    notifier = take_service_environment(environ)
    notifier.note_start()
    with notifier.reloading():
        notifier.observe(STOPPING)
    await notifier.serve()  # returns


def test_no_child_inherits_the_variables() -> None:
    environ = {"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "1", "WATCHDOG_PID": "2", "PATH": "/bin"}
    take_service_environment(environ)
    assert environ == {"PATH": "/bin"}


def test_a_reload_ends_with_ready(systemd: NotifyPeer) -> None:
    notifier = notifier_of(systemd)
    notifier.note_start()
    with notifier.reloading(), notifier.reloading():
        pass
    first, second, third, *_, last = [entry for entry in systemd.arrived() if "STATUS" not in entry]
    assert first == last == {"READY": "1"}
    assert second["RELOADING"] == third["RELOADING"] == "1"
    assert int(second["MONOTONIC_USEC"]) <= int(third["MONOTONIC_USEC"])


def test_a_service_that_stops_is_not_ready_again(systemd: NotifyPeer) -> None:
    notifier = notifier_of(systemd)
    notifier.note_start()
    with notifier.reloading():
        notifier.observe(STOPPING)
    *_, stopping, status = systemd.arrived()
    assert stopping == {"STOPPING": "1", "EXTEND_TIMEOUT_USEC": "30000000"}
    assert status == {"STATUS": "stopping; no model is loaded"}


async def test_pings_stop_while_the_event_loop_is_blocked(systemd: NotifyPeer) -> None:
    notifier = notifier_of(systemd)
    async with served(notifier):
        for _ in range(3):
            assert "WATCHDOG" in await asyncio.to_thread(systemd.next)
        systemd.arrived()
        threading.Event().wait(2 * LIMIT_S)  # blocks the loop
        assert systemd.arrived() == []
        assert "WATCHDOG" in await asyncio.to_thread(systemd.next)


async def test_the_time_limit_is_extended_only_while_something_takes_long(
    systemd: NotifyPeer,
) -> None:
    notifier = notifier_of(systemd)
    async with served(notifier):
        assert await asyncio.to_thread(systemd.next) == {"WATCHDOG": "1"}
        notifier.observe(entered("starting"))
        await asyncio.to_thread(systemd.until_has, "EXTEND_TIMEOUT_USEC")
        notifier.observe(entered("ready"))
        await asyncio.to_thread(systemd.until_has, "STATUS")
        assert await asyncio.to_thread(systemd.next) == {"WATCHDOG": "1"}
        notifier.observe(STOPPING)
        await asyncio.to_thread(systemd.until_has, "STOPPING")
        await asyncio.to_thread(
            systemd.until, lambda entry: {"WATCHDOG", "EXTEND_TIMEOUT_USEC"} <= entry.keys()
        )
