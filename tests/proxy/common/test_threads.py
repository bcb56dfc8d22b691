"""Worker threads and signals."""

from __future__ import annotations

import signal

from proxy.common.background_tasks import worker_threads


def test_worker_threads_leave_signals_to_the_main_thread() -> None:
    with worker_threads(1, "test") as threads:
        blocked = threads.submit(signal.pthread_sigmask, signal.SIG_BLOCK, ()).result()
    assert blocked >= {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
