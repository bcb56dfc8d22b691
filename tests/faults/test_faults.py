"""The quick half of scripts/faults."""

import pytest
from faults import pace
from faults.daemon_under_test import Models
from faults.every import ABSENT, EVERY
from faults.fault import Fault, look

from supervisor.engines.discover import Engine

QUICK = [fault for fault in EVERY if fault.quick]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory, engine: Engine) -> Models:
    return Models.make(tmp_path_factory.mktemp("models"), engine.path)


@pytest.fixture(autouse=True)
def _busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "slack", 20.0)


@pytest.mark.parametrize("fault", QUICK, ids=lambda fault: f"{fault.number} {fault.name}")
def test_a_fault_does_what_is_expected_of_it(fault: Fault, models: Models) -> None:
    result = look(fault, models)
    assert result.seen == result.expected


def test_every_fault_is_here_or_said_to_be_absent() -> None:
    assert {fault.number for fault in EVERY} | set(ABSENT) == set(range(1, 45))
