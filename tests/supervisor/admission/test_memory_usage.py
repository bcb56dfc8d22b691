"""What models take of the memory there is."""

from pathlib import Path

from fakes.instance_harness import RecordingTraffic
from samples import engine, model

from supervisor.admission.memory_usage import HOST, MemoryUsage
from supervisor.admission.observed_memory import ObservedMemory
from supervisor.engines.discover import Engine
from supervisor.flags.plan import Plan
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.launch_id import FileVersion, LaunchFingerprint
from supervisor.fleet.planner import LaunchPlanner
from supervisor.host.paths import Directories
from supervisor.memory.estimate import MemoryInputs
from supervisor.settings.schema import Settings

BUDGET_BYTES = 8 * 1024**3
STAMP = FileVersion(Path("/models/chat.gguf"))
RECIPE = LaunchFingerprint(STAMP, (), STAMP, None, {}, ())


class Planned(LaunchPlanner):
    """Has a plan without reading files."""

    def engine(self) -> Engine:
        return engine()

    def plan(self, model_name: str) -> Plan:
        memory_inputs = MemoryInputs(model(), {"ctx-size": 2048, "parallel": 1}, engine())
        return Plan(model_name, engine(), model(), (), (), (), 1, 2048, memory_inputs)


def taken_bytes(directory: Path, seen_bytes: int) -> int:
    """Return what a model takes of whose instances so much was seen."""
    settings = Settings(
        models={"chat": {"path": "/models/chat.gguf"}},
        supervisor={"memory_budget": BUDGET_BYTES},
    )
    planner = Planned(settings, Directories(*[directory] * 5))
    fleet = Fleet(planner, RecordingTraffic(), lambda *_, **__: None)
    fleet.replica("chat.0").fingerprint = RECIPE
    measured = ObservedMemory()
    measured.note(RECIPE, seen_bytes)
    return MemoryUsage(fleet, measured=measured).required(fleet.models["chat"])[HOST]


def test_what_was_seen_counts_where_it_is_more_than_was_estimated(tmp_path: Path) -> None:
    estimated = taken_bytes(tmp_path, 0)
    assert estimated < taken_bytes(tmp_path, BUDGET_BYTES // 2) < BUDGET_BYTES


def test_one_that_outgrew_all_room_takes_all_of_it_and_can_come_alone(tmp_path: Path) -> None:
    assert taken_bytes(tmp_path, 2 * BUDGET_BYTES) == BUDGET_BYTES
