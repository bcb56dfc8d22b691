"""When cards are read: on request and while somebody watches, in a thread that nobody waits for."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from supervisor.fleet.devices import DeviceMonitor
from supervisor.system.devices import DeviceReading

CARD = DeviceReading(
    "GPU-0",
    "a card",
    load=0.43,
    memory_used_bytes=3 * 1024**3,
    memory_total_bytes=8 * 1024**3,
    memory_free_bytes=5 * 1024**3,
    power_w=95.5,
    power_limit_w=110,
    energy_j=7.25,
    throttled=("power",),
)


class Driver:
    """Counts readings, each of which waits until it `may_answer`."""

    def __init__(self) -> None:
        self.readings = 0
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.now_s = 100.0

    def read(self) -> list[DeviceReading]:
        self.readings += 1
        assert self.may_answer.wait(60)
        return [CARD]

    def monitor(self, limit_s: float = 60) -> DeviceMonitor:
        return DeviceMonitor(self.read, lambda: self.now_s, limit_s=limit_s, interval_s=0)


@asynccontextmanager
async def serving(monitor: DeviceMonitor) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(monitor.serve())
        yield
        task.cancel()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():  # noqa: ASYNC110 (a thread brings it about)
            await asyncio.sleep(0)


async def test_readings_of_the_last_two_seconds_are_not_taken_again() -> None:
    driver = Driver()
    monitor = driver.monitor()
    assert not monitor.latest
    for now_s, count in ((100.0, 1), (101.9, 1), (102.0, 2)):
        driver.now_s = now_s
        await monitor.refresh()
        assert (monitor.latest, driver.readings) == ([CARD], count)
    driver.now_s = 117.0
    assert not monitor.latest


async def test_a_driver_that_hangs_is_waited_for_once_and_has_one_thread() -> None:
    driver = Driver()
    driver.may_answer.clear()
    monitor = driver.monitor(limit_s=0.01)
    await monitor.refresh()
    driver.now_s += 10  # longer than the limit
    async with asyncio.timeout(60):
        await monitor.refresh()
    assert driver.readings == 1
    assert not monitor.latest
    driver.may_answer.set()
    await until(lambda: monitor.latest == [CARD])


async def test_cards_are_read_while_somebody_watches() -> None:
    driver = Driver()
    monitor = driver.monitor()
    async with serving(monitor):
        for _ in range(10):
            await asyncio.sleep(0)
        assert driver.readings == 0
        assert not monitor.watch()
        await until(lambda: monitor.latest == [CARD])
        driver.now_s += 89
        await until(lambda: driver.readings == 2 and monitor.latest == [CARD])
        driver.now_s += 2
        for _ in range(10):
            await asyncio.sleep(0)
        assert driver.readings == 2
        driver.now_s += 2
        monitor.watch()
        await until(lambda: driver.readings == 3)


async def test_metrics_have_the_names_of_nvidias_exporter() -> None:
    monitor = Driver().monitor()
    families = [*monitor.metrics()]
    assert not any(family.samples for family in families)
    await monitor.refresh()
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in monitor.metrics()
        for sample in family.samples
    }
    card = ("0", "GPU-0", "a card")
    assert found == {
        ("DCGM_FI_DEV_GPU_UTIL", *card): 43,
        ("DCGM_FI_DEV_FB_USED", *card): 3 * 1024,
        ("DCGM_FI_DEV_FB_FREE", *card): 5 * 1024,
        ("DCGM_FI_DEV_POWER_USAGE", *card): 95.5,
        ("DCGM_FI_DEV_POWER_MGMT_LIMIT", *card): 110,
        ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", *card): 7250,
        ("corral_device_throttled", *card, "power"): 1,
        ("corral_device_throttled", *card, "temperature"): 0,
        ("corral_device_throttled", *card, "current"): 0,
        ("corral_device_throttled", *card, "hardware"): 0,
    }
