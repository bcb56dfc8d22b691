"""Settings that leave values to the machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support import tiny_gguf
from support.samples import GIB, GPU, engine, machine
from support.stores_layout import HuggingFace

from supervisor.builds.discover import Device, Engine
from supervisor.builds.help import parse
from supervisor.errors import NoSuchModel, OutOfMemory, SettingsInvalid
from supervisor.fleet.launches import ReplicaId
from supervisor.fleet.planner import LaunchPlanner
from supervisor.plan import draft_speed, profile
from supervisor.plan.draft_speed import DraftSpeed
from supervisor.plan.setting import Setting
from supervisor.settings.schema import Settings
from supervisor.slot_store.manifest import cache_key
from supervisor.slot_store.store import RestoreOutcome
from supervisor.system.machine import Machine
from supervisor.system.paths import Directories, shipped_directory

SECOND = Device("Vulkan1", "another GPU", GPU.total_mib)


class FixedPlanner(LaunchPlanner):
    """A workshop with an engine that need not run."""

    used = engine()

    def engine(self) -> Engine:
        return self.used


@pytest.fixture
def make(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that plans one model on a machine of 16 cores."""
    read = "supervisor.fleet.planner.machine.read"
    monkeypatch.setattr(read, lambda: machine(physical_cores=16))

    def made(
        *devices: Device, budget: str | None = None, persist_slots: bool = True, **model: Any
    ) -> FixedPlanner:
        settings = Settings(
            models={"chat": {"path": tiny_model, **model}},
            supervisor={"memory_budget": budget, "persist_slots": persist_slots},
        )
        shop = FixedPlanner(settings, Directories(*[tmp_path] * 5))
        shop.used = engine("b10434", *devices)
        return shop

    return made


def value(shop: LaunchPlanner, number: int, flag: str) -> str | None:
    lines = shop.plan_at(ReplicaId("chat", number)).lines
    return next((line.value for line in lines if line.flag == flag), None)


def test_replicas_are_as_set_or_as_many_as_pay(make: Any) -> None:
    assert make(replicas=3).replicas("chat").count == 3
    shop = make(replicas="auto")
    assert (shop.replicas("chat").count, shop.instances) == (2, 2)
    assert value(shop, 0, "--threads-batch") == "8"


def test_each_replica_has_its_device_where_each_device_has_one(make: Any) -> None:
    shop = make(GPU, SECOND, replicas="auto")
    assert [value(shop, number, "--device") for number in (0, 1)] == ["Vulkan0", "Vulkan1"]
    assert value(make(GPU, SECOND), 0, "--device") is None


def test_slot_files_replace_the_host_cache_of_an_engine_with_a_draft_model(
    make: Any, tmp_path: Path
) -> None:
    table = {
        "path": tiny_gguf.make(tmp_path / "large.gguf", embd=256, heads=8, layers=4, ff=512),
        "draft": tiny_gguf.make(tmp_path / "draft.gguf"),
    }
    shop = make(**table)
    assert value(shop, 0, "--cache-ram") == "0"
    assert value(make(persist_slots=False, **table), 0, "--cache-ram") != "0"
    key = cache_key(shop.plan_at(ReplicaId("chat", 0)))
    outcomes = shop.launches.slot_persistence.store.outcomes
    outcomes.set(key, RestoreOutcome("chat", problem="its engine failed"))
    assert value(shop, 0, "--cache-ram") != "0"


def test_a_draft_that_a_flag_names_takes_memory_too(make: Any, tmp_path: Path) -> None:
    draft = tiny_gguf.make(tmp_path / "draft.gguf")
    plan = make(flags={"spec-draft-model": str(draft)}).plan("chat")
    assert plan.estimate.host.draft > draft.stat().st_size
    assert plan.memory_inputs.draft.path == draft


def test_a_draft_that_made_decoding_slower_is_not_loaded(make: Any, tmp_path: Path) -> None:
    table = {
        "path": tiny_gguf.make(tmp_path / "large.gguf", embd=256, heads=8, layers=4, ff=512),
        "draft": tiny_gguf.make(tmp_path / "draft.gguf"),
    }
    shop = make(**table)
    shop.used = replace(shop.used, path=table["path"])
    before = shop.plan("chat")
    key, slower = before.draft_key, DraftSpeed("draft-simple", drafts=False)
    assert key
    slower = replace(slower, own={1: (4000, 40.0)}, other={1: (400, 8.0)}, speedup=0.5)
    draft_speed.write(Directories(*[tmp_path] * 5).draft_speeds, key, slower)
    plan = shop.plan("chat")
    assert plan.draft_key == key
    assert plan.adapted["spec-type"].value == "none"
    assert (value(shop, 0, "--spec-draft-model"), value(shop, 0, "--spec-type")) == (None, "none")
    assert value(shop, 0, "--cache-ram") != "0"
    assert before.estimate.host.draft > plan.estimate.host.draft == 0
    line = next(line for line in plan.lines if line.flag == "--spec-type")
    assert line.reason.startswith("decoding was 0.50 times as fast with drafts, with 1 busy slot")
    trial = shop.adapting("chat", {"spec-type": slower.trial()})
    assert value(trial, 0, "--spec-draft-model") == str(table["draft"])
    shop = make(**table, flags={"spec-type": "draft-simple"})
    shop.used = replace(shop.used, path=table["path"])
    assert shop.plan("chat").draft_key is None


def test_a_model_that_cannot_be_planned_has_one_replica(make: Any, tmp_path: Path) -> None:
    assert make(replicas="auto", path=tmp_path / "none.gguf").replicas("chat").count == 1
    with pytest.raises(NoSuchModel):
        make().replicas("code")


def test_what_is_worked_out_follows_the_budget(make: Any) -> None:
    ample, tight = make(), make(budget="1 GiB")
    less, more = (int(value(case, 0, "--cache-ram") or 0) for case in (tight, ample))
    assert 0 < less < more
    assert tight.capacity(tight.engine()).host == GIB


def test_what_can_never_fit_is_no_run(make: Any) -> None:
    shop = make(budget="2 MiB")
    assert shop.plan("chat")
    with pytest.raises(OutOfMemory):
        shop.plan_at(ReplicaId("chat", 0))


def test_a_draft_that_was_found_is_part_of_the_fingerprint(make: Any, tmp_path: Path) -> None:
    directory = tmp_path / "models"
    directory.mkdir()
    path = tiny_gguf.make(directory / "large.gguf", embd=256, heads=8, layers=4, ff=512)
    shop = make(path=path, draft="auto")
    assert shop.fingerprint(ReplicaId("chat", 0), engine()).draft is None
    draft = tiny_gguf.make(directory / "small.gguf")
    assert shop.fingerprint(ReplicaId("chat", 0), engine()).draft[0] == draft
    gone = make(path=tmp_path / "none.gguf", draft="auto")
    assert gone.fingerprint(ReplicaId("chat", 0), engine()).draft is None
    missing = "hf:org/tiny-GGUF:Q8_0"
    assert make(draft=missing).fingerprint(ReplicaId("chat", 0), engine()).draft[0] == Path(missing)
    named = make(draft=draft)
    assert named.fingerprint(ReplicaId("chat", 0), engine()).draft[0] == draft


def test_a_projector_is_counted(make: Any, tmp_path: Path) -> None:
    (tmp_path / "eyes.gguf").write_bytes(b"x" * 77)
    shop = make(flags={"mmproj": str(tmp_path / "eyes.gguf")})
    assert shop.plan("chat").estimate.host.projector == 77


def tuned(root: Path, text: str) -> None:
    (root / "profiles.d").mkdir()
    (root / "profiles.d" / "chat.toml").write_text(text)


def test_a_tuned_profile_lies_between_the_profile_and_the_models_own_flags(
    make: Any, tmp_path: Path
) -> None:
    before = make().fingerprint(ReplicaId("chat", 0), engine())
    tuned(tmp_path, 'extends = "base"\n[flags]\nthreads = 3\npoll = 7\n')
    shop = make(flags={"poll": 9})
    lines = {line.flag: line for line in shop.plan("chat").lines}
    assert (lines["--threads"].value, lines["--threads"].origin) == (
        "3",
        "profile chat (tuned)",
    )
    assert (lines["--poll"].value, lines["--poll"].origin) == ("9", "model chat")
    assert make().fingerprint(ReplicaId("chat", 0), engine()) != before


def test_a_tuned_number_of_replicas_is_for_models_without_one(make: Any, tmp_path: Path) -> None:
    tuned(tmp_path, "replicas = 3\n")
    assert (make().replicas("chat").count, make().instances) == (3, 3)
    assert make(replicas=1).replicas("chat").count == 1


def test_a_tuned_profile_of_another_profile_is_not_used_and_the_plan_says_so(
    make: Any, tmp_path: Path
) -> None:
    tuned(tmp_path, 'extends = "base"\nreplicas = 3\n[flags]\nthreads = 3\n')
    shop = make(profile="low-latency")
    assert value(shop, 0, "--threads") != "3"
    assert shop.replicas("chat").count == 1
    plan = shop.plan("chat")
    (warning,) = plan.tuned
    assert "chat.toml is not used" in warning
    assert warning in plan.warnings


def test_a_broken_tuned_profile_fails_the_plan_not_the_planner(make: Any, tmp_path: Path) -> None:
    tuned(tmp_path, "nonsense")
    shop = make()
    assert shop.instances == 1
    with pytest.raises(SettingsInvalid, match=r"chat\.toml is not TOML"):
        shop.plan("chat")


def test_a_trial_is_one_more_replica_with_its_own_profile_and_flags(make: Any) -> None:
    trial = {"profile": "high-throughput", "share": 0.2, "flags": {"poll": 0}}
    shop = make(replicas=2, flags={"poll": 50, "prio": 1}, trial=trial)
    places = shop.replicas_of("chat")
    assert places == tuple(ReplicaId("chat", number) for number in range(3))
    assert [value(shop, number, "--parallel") for number in range(3)] == ["4", "4", "16"]
    assert [value(shop, number, "--poll") for number in range(3)] == ["50", "50", "0"]
    assert value(shop, 2, "--prio") == "1"
    assert [shop.trial_at(place) is None for place in places] == [True, True, False]
    assert shop.instances == 3


def test_only_the_trial_has_another_fingerprint(make: Any) -> None:
    profiles = ("low-memory", "speculative")
    shops = [make(), *(make(trial={"profile": profile, "share": 0.5}) for profile in profiles)]
    base, trial = ReplicaId("chat", 0), ReplicaId("chat", 1)
    assert len({str(shop.fingerprint(base, engine())) for shop in shops}) == 1
    assert len({str(shop.fingerprint(trial, engine())) for shop in shops}) == 3
    unknown = make(trial={"profile": "nothing", "share": 0.5})
    assert unknown.plan("chat")
    with pytest.raises(SettingsInvalid, match="nothing"):
        unknown.fingerprint(trial, engine())


def test_a_model_and_its_trial_may_have_different_engines(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(path: Path, **_: object) -> Engine:
        return engine("b10434", path=path)

    monkeypatch.setattr("supervisor.fleet.planner.discover.load", found)
    new = {"engine": "/opt/new/llama-server", "share": 0.1}
    shop = make(engine="/opt/own/llama-server", trial=new)
    used = [shop.plan_at(place).engine.path for place in shop.replicas_of("chat")]
    assert used == [Path("/opt/own/llama-server"), Path("/opt/new/llama-server")]
    own, tried = (
        shop.fingerprint(replica, shop.engine_at(replica)) for replica in shop.replicas_of("chat")
    )
    assert (own.engine[0], tried.engine[0]) == tuple(used)
    assert make().plan("chat").engine.path == engine().path


def test_a_trial_has_slots_as_long_as_those_of_its_model(make: Any) -> None:
    shorter = make(trial={"flags": {"parallel": 1, "ctx-size": 512}, "share": 0.5})
    per_slot = int(value(shorter, 0, "--ctx-size") or 0) // 4
    assert value(shorter, 1, "--ctx-size") == str(per_slot) != "512"
    longer = make(trial={"flags": {"ctx-size": 65536}, "share": 0.5})
    assert int(value(longer, 0, "--ctx-size") or 0) < 65536
    assert value(longer, 1, "--ctx-size") == "65536"


@pytest.mark.parametrize(
    "trial",
    [
        {"share": 0.5},
        {"profile": "base"},
        {"profile": "base", "share": 0},
        {"profile": "base", "share": 1},
        {"profile": "base", "share": 0.5, "replicas": 2},
    ],
)
def test_a_trial_needs_something_to_try_and_a_share_between_0_and_1(
    make: Any, trial: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError, match="trial"):
        make(trial=trial)


def test_adapted_values_are_of_one_model_and_another_planner(make: Any) -> None:
    shop = make()
    more = {"parallel": Setting(8, "demand", "requests waited")}
    adapting = shop.adapting("chat", more)
    assert adapting.plan("chat").slots == adapting.plan_at(ReplicaId("chat", 0)).slots == 8
    assert shop.plan("chat").slots == 4
    assert shop.adapting("other", more).plan("chat").slots == 4


def test_a_draft_by_reference_is_used_once_it_is_stored(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = HuggingFace(tmp_path / "hub")
    monkeypatch.setenv("HF_HUB_CACHE", str(hub.root))
    shop = make(draft="hf:org/tiny-GGUF:Q8_0")
    plan = shop.plan("chat")
    (missing,) = plan.missing_draft
    assert missing == (
        "the model runs without its draft model: hf:org/tiny-GGUF:Q8_0 is not stored on this "
        "machine; corral model get org/tiny-GGUF:Q8_0 fetches it"
    )
    assert value(shop, 0, "--spec-draft-model") is None
    hub.root.mkdir(parents=True, exist_ok=True)
    draft = tiny_gguf.make(tmp_path / "draft.gguf", embd=16, heads=2, layers=1, ff=16)
    hub.add("org/tiny-GGUF", "tiny-Q8_0.gguf", draft.read_bytes())
    assert str(value(shop, 0, "--spec-draft-model")).endswith("tiny-Q8_0.gguf")
    used = shop.fingerprint(ReplicaId("chat", 0), engine()).draft
    assert used[0].name == "tiny-Q8_0.gguf"


def test_the_number_of_replicas_does_not_follow_adapted_values(make: Any) -> None:
    shop = make(replicas="auto")
    huge = {"parallel": Setting(1024, "demand", "requests waited")}
    assert shop.replicas("chat").count == 2
    assert shop.adapting("chat", huge).replicas("chat").count == 2


def test_plans_of_many_models_do_not_count_all_replicas_again(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, replicas_of = [], LaunchPlanner.replicas_of

    def count(planner: LaunchPlanner, model: str) -> tuple[ReplicaId, ...]:
        counted.append(model)
        return replicas_of(planner, model)

    monkeypatch.setattr(LaunchPlanner, "replicas_of", count)
    settings = Settings(models={f"m{number}": {"path": tiny_model} for number in range(40)})
    planner = FixedPlanner(settings, Directories(*[tmp_path] * 5))
    assert all(planner.plan(model).model == model for model in planner.entries)
    assert counted == list(planner.entries)


def test_plans_at_one_moment_read_machine_engine_and_profile_once(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []

    def returning(name: str, value: Any) -> Any:
        def read(*_: object, **__: object) -> Any:
            reads.append(name)
            return value

        return read

    base = profile.load("base", [shipped_directory("profiles")])
    monkeypatch.setattr("supervisor.fleet.planner.machine.read", returning("machine", machine()))
    monkeypatch.setattr("supervisor.fleet.planner.discover.load", returning("engine", engine()))
    loaded = returning("profile", base)
    monkeypatch.setattr("supervisor.fleet.planner.profile.load", loaded)
    settings = Settings(models={f"m{number}": {"path": tiny_model} for number in range(9)})
    planner = LaunchPlanner(settings, Directories(*[tmp_path] * 5))
    once = planner.reading_once()
    assert all(once.plan(model).model == model for model in planner.entries)
    assert sorted(reads) == ["engine", "machine", "profile"]
    planner.plan("m0")
    assert reads.count("engine") == 2


def test_the_machine_is_read_once_to_count_the_replicas_of_many_models(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[str] = []

    def read() -> Machine:
        reads.append("machine")
        return machine(physical_cores=16)

    monkeypatch.setattr("supervisor.fleet.planner.machine.read", read)
    table = {"path": tiny_model, "replicas": "auto"}
    settings = Settings(models={f"m{number}": table for number in range(9)})
    planner = FixedPlanner(settings, Directories(*[tmp_path] * 5))
    assert planner.instances >= 9
    assert reads == ["machine"]


def test_the_help_of_an_engine_is_parsed_once() -> None:
    text = "-c, --ctx-size N   size of the context (default: 0)\n"
    assert parse(text) is parse(text)
