"""Asks the daemon in a thread, so that keys work while it does not answer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Final

from supervisor.control.client import Client
from supervisor.top.sample import Sample, cancel, try_read

_CANCELLATIONS_MAX: Final = 16
_SAMPLES_MAX: Final = 4


class Poller:
    """Samples at an interval, and cancels requests; `wake` is called from its thread."""

    def __init__(self, client: Client, interval_s: float, wake: Callable[[], None]) -> None:
        self._client = client
        self._interval_s = interval_s
        self._wake = wake
        self._cancellations: queue.Queue[str] = queue.Queue(_CANCELLATIONS_MAX)
        # While the terminal takes no output the daemon is not asked either.
        self._samples: queue.Queue[Sample] = queue.Queue(_SAMPLES_MAX)

    def start(self) -> None:
        # A daemon thread: the end does not wait for a daemon that does not answer.
        threading.Thread(target=self._run, daemon=True).start()

    def cancel(self, request_id: str) -> bool:
        """Cancel a request soon; False where too many are to be cancelled already."""
        try:
            self._cancellations.put_nowait(request_id)
        except queue.Full:
            return False
        return True

    def take(self) -> Sample | None:
        """Return the next sample, None where none has come since."""
        try:
            return self._samples.get_nowait()
        except queue.Empty:
            return None

    def _run(self) -> None:
        while True:
            note = self._cancelled()
            self._samples.put(try_read(self._client, note))
            self._wake()

    def _cancelled(self) -> str:
        """Wait for the interval, or for a request to cancel; return what became of that."""
        try:
            request_id = self._cancellations.get(timeout=self._interval_s)
        except queue.Empty:
            return ""
        return cancel(self._client, request_id)
