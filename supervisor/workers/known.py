"""What the daemon knows of workers, whatever the settings are reloaded to."""

from __future__ import annotations

from collections.abc import Callable

from supervisor.engines.discover import Device
from supervisor.workers.address import WorkerAddress


class KnownWorkers:
    """The ports of local workers, and what workers answered when they were last asked.

    Args:
        choose_port: Returns the port of a local worker whose settings leave it open. A command,
            which runs none, has 0: not chosen yet.
    """

    def __init__(self, choose_port: Callable[[], int] = lambda: 0) -> None:
        self._choose_port = choose_port
        self._ports: dict[str, int] = {}
        self._devices: dict[str, tuple[Device, ...]] = {}
        self._problems: dict[str, str] = {}

    def port(self, name: str) -> int:
        """Return the port of a local worker, the same for as long as the daemon runs."""
        if name not in self._ports:
            self._ports[name] = self._choose_port()
        return self._ports[name]

    def note_port(self, name: str, port: int) -> None:
        self._ports[name] = port

    def devices(self, address: WorkerAddress) -> tuple[Device, ...]:
        """Return the devices that it offered last; none if it never answered."""
        return self._devices.get(str(address), ())

    def problem(self, address: WorkerAddress) -> str | None:
        """Return why it did not answer when it was last asked, or None."""
        return self._problems.get(str(address))

    def note_devices(self, address: WorkerAddress, devices: tuple[Device, ...]) -> None:
        self._devices[str(address)] = devices
        self._problems.pop(str(address), None)

    def note_problem(self, address: WorkerAddress, reason: str) -> None:
        self._problems[str(address)] = reason
