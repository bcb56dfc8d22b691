"""`corral tune` from its words to its file, with figures made up in place of engines."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from supervisor.bench.figures import RATE, compare
from supervisor.bench.tune import Quality, QualityChecks, judge
from supervisor.bench.tune_measure import NO_MEMORY, Measurements, Sizes
from supervisor.bench.tune_search import NO_TIME, UNCHECKED, Figures, Outcome
from supervisor.bench.tune_space import Variant
from supervisor.cli.bench import check_tuned, tune, undo
from supervisor.cli.plan import plan
from supervisor.errors import ModelInvalid, SettingsInvalid, StartFailed
from supervisor.output import CommandResult
from supervisor.system import machine

FASTER = "poll"


@pytest.fixture
def home(
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    runtime: Path,
    engine_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """A user's directories, with settings that name the engine."""
    for name in ("CONFIG", "DATA", "LOG"):
        monkeypatch.setenv(f"CORRAL_{name}_DIR", str(tmp_path / name.lower()))
    monkeypatch.setenv("CORRAL_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("CORRAL_RUNTIME_DIR", str(runtime))
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "corral.toml").write_text(f'engine = "{engine_path}"\n')
    # Which variants there are depends on the processor.
    two_cores = replace(machine.read(), logical_cores=2, physical_cores=2)
    monkeypatch.setattr("supervisor.system.machine.read", lambda: two_cores)
    return tmp_path


class Speeds:
    """Speeds of variants by the flag that they set; others are as fast as the base."""

    def __init__(self, **by_flag: float) -> None:
        self.by_flag = by_flag
        self.measured = 0
        self.fails_after: tuple[int, BaseException] | None = None
        self.measured_once: set[Variant] | None = None  # a variant of the set fails

    async def measure(self, of: Measurements, variant: Variant, _limit_s: float) -> Any:
        self.measured += 1
        if self.fails_after and self.measured > self.fails_after[0]:
            raise self.fails_after[1]
        of.sizes = Sizes(500, 64, 32, 32, 40)
        if self.by_flag.get("base") == 0 or variant in (self.measured_once or ()):
            return "its engine did not start"
        if self.measured_once is not None and variant.flags:
            self.measured_once.add(variant)
        factor = 1.0 + self.measured % 7 / 1000
        for key, _ in variant.flags:
            factor *= self.by_flag.get(key, 1.0)
        return Figures(100 * factor, 1 / factor, 150 * factor, int(1e9 / factor))


@pytest.fixture
def speeds(monkeypatch: pytest.MonkeyPatch) -> Speeds:
    found = Speeds()

    async def measure(self: Measurements, variant: Variant, limit_s: float) -> Any:
        return await found.measure(self, variant, limit_s)

    async def check(self: QualityChecks, variant: Variant, _limit_s: float) -> None:
        self.found[variant] = Quality(200, 200, 0.0)

    monkeypatch.setattr(Measurements, "measure", measure)
    monkeypatch.setattr(QualityChecks, "check", check)
    return found


def run(model: Path, **options: Any) -> CommandResult:
    return tune(str(model), None, **options, force=True)


def data(found: CommandResult) -> dict[str, Any]:
    assert isinstance(found.data, dict)
    return found.data


def written(home: Path) -> Path:
    return home / "config" / "profiles.d" / "tiny.toml"


def test_what_is_faster_is_written_and_the_plan_says_so(
    home: Path, speeds: Speeds, tiny_model: Path
) -> None:
    speeds.by_flag = {FASTER: 1.3}
    found = run(tiny_model)
    assert data(found)["winner"].startswith("poll ")
    assert "1.30 × faster" in found.text
    assert "quality: answers equal on 200 tokens" in found.text
    assert "corral reload" in " ".join(found.notes)
    text = written(home).read_text()
    assert 'extends = "base"' in text
    assert "# decoding, one stream: 100." in text
    shown = plan(str(tiny_model), None)
    assert "for latency: 1.30 × faster" in shown.text
    assert "profile tiny (tuned)" in shown.text
    assert not shown.notes


def test_a_second_search_keeps_the_first_and_two_undos_remove_both(
    home: Path, speeds: Speeds, tiny_model: Path
) -> None:
    speeds.by_flag = {FASTER: 1.3}
    run(tiny_model)
    first = written(home).read_text()
    found = run(tiny_model, goal="throughput", seed=2)
    # The second was measured against the profile, not against what the first had found.
    assert data(found)["winner"].startswith("poll ")
    assert data(found)["backup"] == f"{written(home)}.1"
    assert "is restored" in undo("tiny").text
    assert written(home).read_text() == first
    assert "removed" in undo(str(tiny_model)).text
    assert not list(written(home).parent.iterdir())
    with pytest.raises(SettingsInvalid, match="nothing to undo"):
        undo("tiny")


def check(model: Path) -> CommandResult:
    return check_tuned(str(model), None, force=True)


def test_a_tuned_profile_that_still_helps_stays_and_is_of_the_present_engine(
    home: Path, speeds: Speeds, tiny_model: Path
) -> None:
    speeds.by_flag = {FASTER: 1.3}
    run(tiny_model)
    tuned, now = written(home), "engine = "
    (engine,) = [line for line in tuned.read_text().splitlines() if line.startswith(now)]
    tuned.write_text(tuned.read_text().replace(engine, 'engine = "b1"'))
    assert any("--check measures whether" in note for note in plan(str(tiny_model), None).notes)

    speeds.by_flag = {FASTER: 1.1}
    found = check(tiny_model)
    assert data(found)["judgement"] == "better"
    assert "1.10 × faster" in found.text
    assert [row["variant"] for row in data(found)["tried"]][1:] == [plan_flag(tuned)]
    assert engine in tuned.read_text()
    assert "1.10 × faster" in tuned.read_text()
    assert not plan(str(tiny_model), None).notes
    assert [*tuned.parent.iterdir()] == [tuned]

    speeds.by_flag = {}
    found = check(tiny_model)
    assert data(found)["judgement"] == "as good"
    assert "--undo removes it" in " ".join(found.notes)
    assert tuned.exists()


def plan_flag(tuned: Path) -> str:
    """The only flag of a tuned profile, as the search names it."""
    (flag,) = tomllib.loads(tuned.read_text())["flags"].items()
    return "{} {}".format(*flag)


def test_a_tuned_profile_that_is_worse_now_is_removed_and_can_be_restored(
    home: Path, speeds: Speeds, tiny_model: Path
) -> None:
    speeds.by_flag = {FASTER: 1.3}
    run(tiny_model)
    text = written(home).read_text()
    speeds.by_flag = {FASTER: 0.8}
    found = check(tiny_model)
    assert data(found)["judgement"] == "worse"
    assert "is removed" in found.text
    assert not written(home).exists()
    undo("tiny")
    assert written(home).read_text() == text


def test_a_check_without_time_for_it_changes_nothing(
    home: Path, speeds: Speeds, tiny_model: Path
) -> None:
    speeds.by_flag = {FASTER: 1.3}
    run(tiny_model)
    text = written(home).read_text()
    speeds.fails_after = (speeds.measured + 4, KeyboardInterrupt())
    assert check(tiny_model).exit_code == 130
    assert written(home).read_text() == text


def test_without_a_tuned_profile_that_is_used_there_is_nothing_to_check(
    home: Path, speeds: Speeds, tiny_model: Path
) -> None:
    with pytest.raises(SettingsInvalid, match="nothing to check"):
        check(tiny_model)
    speeds.by_flag = {FASTER: 1.3}
    run(tiny_model)
    tuned = written(home)
    tuned.write_text(tuned.read_text().replace('extends = "base"', 'extends = "low-latency"'))
    with pytest.raises(SettingsInvalid, match="is not used: it extends the profile low-latency"):
        check(tiny_model)


@pytest.mark.parametrize(
    ("winner", "ratio", "failure", "expected"),
    [
        (True, 1.1, None, "better"),
        (False, 1.001, None, "as good"),
        (False, 0.96, None, "uncertain"),
        (False, 0.9, None, "worse"),
        (False, 1.2, "it decodes 0.80 × slower", "worse"),
        (False, None, "its engine did not start", "worse"),
        (False, None, NO_TIME, "uncertain"),
        (False, 1.2, f"{UNCHECKED}the engine ended", "uncertain"),
        (False, None, f"{NO_MEMORY}: it needs 2 GiB of main memory", "uncertain"),
        (False, math.nan, None, "uncertain"),
    ],
)
def test_what_a_check_says(
    *, winner: bool, ratio: float | None, failure: str | None, expected: str
) -> None:
    pairs = [] if ratio is None or math.isnan(ratio) else [100.0] * 6
    noise = (1.03, 0.97, 1.05, 0.95, 1.02, 0.98) if ratio == 0.96 else (1.001, 0.999) * 3
    other = [value * (ratio or 1) * change for value, change in zip(pairs, noise, strict=False)]
    compared = None if ratio is None else compare(pairs, other, words=RATE)
    outcome = Outcome(Variant() if winner else None, compared, (), range(1))
    assert judge(outcome, failure, RATE) == expected


def test_nothing_is_written_where_the_profile_is_as_good(
    home: Path, speeds: Speeds, tiny_model: Path
) -> None:
    speeds.by_flag = {"threads": 0.5, "flash-attn": 0.7}
    found = run(tiny_model)
    assert "its profile is as good as any variant that was tried" in found.text
    assert data(found)["winner"] is None
    assert not written(home).exists()


def test_after_one_round_no_profile_is_called_as_good(
    home: Path, speeds: Speeds, tiny_model: Path
) -> None:
    speeds.measured_once = set()
    found = run(tiny_model)
    assert "one round: nothing can be compared; nothing was written" in found.text


def test_a_better_variant_that_there_was_no_time_to_check_is_named(
    home: Path, speeds: Speeds, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def late(*_: object) -> str:
        return NO_TIME

    speeds.by_flag = {FASTER: 1.3}
    monkeypatch.setattr(QualityChecks, "check", late)
    found = run(tiny_model)
    assert f"×) was rejected: {NO_TIME}" in found.text
    assert not written(home).exists()


def test_an_interrupt_shows_the_measurements_and_writes_nothing(
    home: Path, speeds: Speeds, tiny_model: Path
) -> None:
    speeds.by_flag = {FASTER: 1.3}
    speeds.fails_after = (30, KeyboardInterrupt())
    found = run(tiny_model)
    assert found.exit_code == 130
    assert "stopped; nothing was written" in found.text
    assert "best so far, not certain: poll" in found.text
    assert not written(home).exists()


def test_a_profile_that_cannot_be_measured_is_an_error(
    home: Path, speeds: Speeds, tiny_model: Path
) -> None:
    speeds.by_flag = {"base": 0}
    with pytest.raises(StartFailed, match="its engine did not start") as caught:
        run(tiny_model)
    assert "--minutes 20" in (caught.value.hint or "")


def test_a_model_that_generates_no_text_is_refused(home: Path, tiny_model: Path) -> None:
    settings = home / "config" / "corral.toml"
    settings.write_text(
        settings.read_text()
        + f'[models.e]\npath = "{tiny_model}"\n[models.e.flags]\nreranking = true\n'
    )
    with pytest.raises(ModelInvalid, match="makes embeddings"):
        tune("e", None, force=True)


def test_a_tuned_profile_of_a_name_with_a_slash_is_undone(home: Path) -> None:
    profiles = home / "config" / "profiles.d"
    profiles.mkdir()
    (profiles / "qwen%2Ftiny:q4.toml").write_text("[tuned]\n")
    (profiles / "tiny:q4.toml").write_text("[tuned]\n")
    assert "qwen/tiny:q4 runs with its profile alone" in undo("qwen/tiny:q4").text
    assert [path.name for path in profiles.iterdir()] == ["tiny:q4.toml"]
