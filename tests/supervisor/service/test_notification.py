import os

import pytest

from supervisor.service import notifier

PID = os.getpid()


def test_a_status_stays_one_line() -> None:
    assert notifier.status("a\nREADY=1\tb") == "STATUS=a READY=1 b"


def test_a_reload_has_its_time_in_microseconds() -> None:
    assert notifier.reloading_text(5_000_999) == "RELOADING=1\nMONOTONIC_USEC=5000"


@pytest.mark.parametrize(
    ("environ", "limit_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(PID)}, 30.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(PID + 1)}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({"WATCHDOG_USEC": "9" * 5000}, None),
    ],
)
def test_the_watchdog_is_for_the_process_that_it_names(
    environ: dict[str, str], limit_s: float | None
) -> None:
    assert notifier.watchdog_s(environ, PID) == limit_s
