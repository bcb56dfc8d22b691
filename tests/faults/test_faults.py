"""Eight of the faults of scripts/faults."""

from pathlib import Path

import pytest
from faults import pace
from faults.daemon_under_test import Models
from faults.every import ABSENT, EVERY
from faults.fault import Fault, run
from support.fork_server import ForkServer

from supervisor.builds.discover import Engine

QUICK = [fault for fault in EVERY if fault.quick]


@pytest.fixture(scope="session")
def models(tiny_model: Path, slow_model: Path, engine: Engine) -> Models:
    return Models(tiny_model, slow_model, engine)


@pytest.fixture(autouse=True)
def _busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "slack", 100.0)


@pytest.mark.parametrize("fault", QUICK, ids=lambda fault: f"{fault.number} {fault.name}")
def test_the_effect_of_a_fault_is_as_expected(
    fault: Fault, models: Models, fork_server: ForkServer
) -> None:
    result = run(fault, models, fork_server)
    assert result.seen == result.expected


def test_every_number_has_a_fault_or_a_reason_for_its_absence() -> None:
    assert {fault.number for fault in EVERY} | set(ABSENT) == set(range(1, 45))
