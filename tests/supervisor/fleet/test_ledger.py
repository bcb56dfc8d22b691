"""What models take of the memory there is."""

from pathlib import Path

from fakes.ranch import QUICK, RecordingTraffic
from samples import engine, model

from supervisor.fleet.difference import Recipe, Stamp
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.ledger import HOST, Ledger
from supervisor.fleet.measured import Measured
from supervisor.fleet.workshop import Workshop
from supervisor.host.paths import Directories
from supervisor.profile.engine import Engine
from supervisor.profile.memory import Burden
from supervisor.profile.plan import Plan
from supervisor.settings.root import Settings

BUDGET_BYTES = 8 * 1024**3
STAMP = Stamp(Path("/models/chat.gguf"))
RECIPE = Recipe(STAMP, (), STAMP, None, {}, ())


class Planned(Workshop):
    """Has a plan without reading files."""

    def engine(self) -> Engine:
        return engine()

    def plan(self, model_name: str) -> Plan:
        burden = Burden(model(), {"ctx-size": 2048, "parallel": 1}, engine())
        return Plan(model_name, engine(), model(), (), (), (), 1, 2048, burden)


def taken_bytes(directory: Path, seen_bytes: int) -> int:
    """Return what a model takes of whose instances so much was seen."""
    settings = Settings(
        models={"chat": {"path": "/models/chat.gguf"}},
        supervisor={"memory_budget": BUDGET_BYTES},
    )
    workshop = Planned(settings, Directories(*[directory] * 5))
    fleet = Fleet(workshop, RecordingTraffic(), lambda *_, **__: None, QUICK)
    fleet.replica("chat.0").recipe = RECIPE
    measured = Measured()
    measured.note(RECIPE, seen_bytes)
    return Ledger(fleet, measured=measured).takes(fleet.models["chat"])[HOST]


def test_what_was_seen_counts_where_it_is_more_than_was_estimated(tmp_path: Path) -> None:
    estimated = taken_bytes(tmp_path, 0)
    assert estimated < taken_bytes(tmp_path, BUDGET_BYTES // 2) < BUDGET_BYTES


def test_one_that_outgrew_all_room_takes_all_of_it_and_can_come_alone(tmp_path: Path) -> None:
    assert taken_bytes(tmp_path, 2 * BUDGET_BYTES) == BUDGET_BYTES
