"""A daemon whose tasks all fail goes on serving, and says so once."""

from __future__ import annotations

import asyncio
import json
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from proxy.failures import FAILURES
from proxy.nodes.monitor import NodeMonitor
from proxy.router.slot_release import SlotReleaser
from supervisor.admission.controller import AdmissionController
from supervisor.admission.memory_usage import MemoryUsage
from supervisor.daemon import Daemon
from supervisor.events import Event, EventStream
from supervisor.host.paths import directories
from supervisor.instance.health_monitor import HealthMonitor
from supervisor.reload.triggers import ReloadTriggers
from supervisor.settings.load import Loaded, load

CONFIG = """
[proxy]
listen = "127.0.0.1:0"
[nodes.other]
url = "http://127.0.0.1:9"
[models.tiny]
path = "{path}"
flags = {{ parallel = 1 }}
"""
FAILING = [
    (AdmissionController, "_reconcile"),
    (ReloadTriggers, "_run"),
    (NodeMonitor, "_poll"),
    (SlotReleaser, "_give_back"),
    (HealthMonitor, "_sample"),
    (MemoryUsage, "free"),
    (psutil.Process, "memory_info"),
    (psutil.Process, "cpu_times"),
    (psutil, "virtual_memory"),
]


def failing(times: int, real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that fails so often before it does what it should."""
    left = [times]

    def call(*given: Any, **named: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise OSError(24, "Too many open files")
        return real(*given, **named)

    return call


def get(url: str, **body: Any) -> Any:
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        return response.read().decode()


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """Put back how this process takes signals, which a daemon ignores in the end."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(("owner", "name"), FAILING, ids=lambda one: getattr(one, "__name__", one))
async def test_a_task_that_fails_ends_nothing(
    owner: Any, name: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("config", "log", "runtime", "data"):
        monkeypatch.setenv(f"CORRAL_{kind.upper()}_DIR", str(tmp_path / kind))
    (tmp_path / "corral.toml").write_text(CONFIG.format(path=tiny_model))
    events: list[Event] = []

    def read() -> Loaded:
        return load(tmp_path / "corral.toml", config_dir=tmp_path)

    daemon = Daemon(read(), read, directories(), EventStream(events.append))
    ready = asyncio.Event()
    monkeypatch.setattr(owner, name, failing(3, getattr(owner, name)))
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        life = group.create_task(daemon.run(["tiny"], ready.set))
        await ready.wait()
        url = daemon.status()["url"]
        body = {"prompt": "hello", "max_tokens": 2, "model": "tiny"}
        assert "choices" in await asyncio.to_thread(get, f"{url}/v1/completions", **body)
        daemon._triggers.tell()
        await daemon.refresh()
        assert "corral_" in await asyncio.to_thread(get, f"{url}/metrics")
        assert not life.done()
        daemon.shutdown("the test is over")
    assert all(one.fields["task"] in FAILURES.counts for one in events if one.name == "task.failed")
