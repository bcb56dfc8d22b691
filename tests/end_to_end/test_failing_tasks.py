"""A daemon whose tasks fail continues to serve, and reports each failure once."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from proxy.common.background_tasks import FAILURES
from proxy.nodes.monitor import NodeMonitor
from proxy.router.engine_faults import SlotReleaser
from supervisor.daemon.daemon import Daemon
from supervisor.daemon.parts import DaemonParts
from supervisor.engine.state_tasks import HealthMonitor
from supervisor.events import Event, EventStream
from supervisor.fleet.reload import Reload
from supervisor.loading.controller import AdmissionController
from supervisor.loading.memory_usage import MemoryUsage
from supervisor.service.notifier import ServiceNotifier
from supervisor.settings.load import Loaded, load
from supervisor.system.paths import directories

CONFIG = """
[proxy]
listen = "127.0.0.1:0"
[supervisor]
measure_threads = false
adaptive = false
[nodes.other]
url = "http://127.0.0.1:9"
[models.tiny]
path = "{path}"
flags = {{ parallel = 1 }}
"""
TASKS = [
    (AdmissionController, "_reconcile"),
    (Reload, "run"),
    (NodeMonitor, "_poll"),
    (SlotReleaser, "_free_when_idle"),
    (HealthMonitor, "_sample"),
    (MemoryUsage, "free"),
    (psutil.Process, "memory_info"),
]
MACHINE = [(psutil, "virtual_memory")]


def fails_thrice(
    name: str, hit: dict[str, asyncio.Event], real: Callable[..., Any]
) -> Callable[..., Any]:
    """Return a function that fails three times before it works."""
    left = [3]

    def call(*given: Any, **named: Any) -> Any:
        if left[0]:
            left[0] -= 1
            hit[name].set()
            raise OSError(24, "Too many open files")
        return real(*given, **named)

    return call


def get(url: str, **body: Any) -> Any:
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read().decode()


def leave_a_stream(url: str, **body: Any) -> None:
    data = json.dumps({**body, "max_tokens": 1000, "stream": True}).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        assert response.readline()


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Restore the signal handlers of this process; a daemon that ends ignores signals."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("failing", [TASKS, MACHINE], ids=["tasks", "machine"])
async def test_failures_end_nothing(
    failing: list[tuple[Any, str]],
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FAILURES, "counts", Counter())
    for kind in ("config", "log", "runtime", "data"):
        monkeypatch.setenv(f"CORRAL_{kind.upper()}_DIR", str(tmp_path / kind))
    (tmp_path / "corral.toml").write_text(CONFIG.format(path=tiny_model))
    events: list[Event] = []

    def read(_content: bytes | None = None) -> Loaded:
        return load(tmp_path / "corral.toml", config_dir=tmp_path)

    stream = EventStream(events.append)
    daemon = Daemon(DaemonParts(read(), read, directories(), stream, ServiceNotifier()))
    ready = asyncio.Event()
    hit = {name: asyncio.Event() for _, name in failing}
    for owner, name in failing:
        monkeypatch.setattr(owner, name, fails_thrice(name, hit, getattr(owner, name)))
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        running = group.create_task(daemon.run(["tiny"], ready.set))
        await ready.wait()
        url = daemon.service.current_status().url
        body = {"prompt": "hello", "max_tokens": 2, "model": "tiny"}
        assert "choices" in await asyncio.to_thread(get, f"{url}/v1/completions", **body)
        await asyncio.to_thread(leave_a_stream, f"{url}/v1/completions", **body)
        daemon.parts.reload.schedule()
        await daemon.service.refresh()
        assert "corral_" in await asyncio.to_thread(get, f"{url}/metrics")
        for event in hit.values():
            await event.wait()
        assert not running.done()
        daemon.shutdown("the test is over")
    assert all(
        event.fields["task"] in FAILURES.counts for event in events if event.name == "task.failed"
    )
