"""`corral bench` as a user runs it: results, mistakes, interruptions, and beside a daemon."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support import tiny_bert
from support.corral_cli import CorralCli, until

ONCE = ("--repeats", "1", "--force")


@pytest.fixture
def configured(corral: CorralCli, tiny_model: Path) -> CorralCli:
    corral.configure(f'[models.tiny]\npath = "{tiny_model}"\n')
    return corral


@contextmanager
def running(corral: CorralCli, starts: int, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Run a bench without end, and yield it when it has started so many engines."""
    argv = corral.argv("bench", "tiny", "--profiles", "base", "--workload", "generation", *words)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*argv, "--force", "--repeats", "1000"],
        env=corral.env, stdout=pipe, stderr=pipe, text=True,
    ) as process:  # fmt: skip
        started = set[int]()

        def has_started() -> bool:
            started.update(pids(corral))
            return len(started) >= starts

        until(has_started)
        yield process
        process.kill()


def pids(corral: CorralCli) -> set[int]:
    return {engine.pid for engine in corral.engines()}


def test_a_result_has_all_raw_values(configured: CorralCli) -> None:
    data = configured.data("bench", "tiny", *ONCE, "--workload", "generation", "--seed", "4")
    assert [variant["name"] for variant in data["variants"]] == ["plain", "base"]
    assert (data["seed"], data["rounds"], data["is_interrupted"]) == (4, 1, False)
    names = {figure["name"] for figure in data["figures"]}
    assert {"generation.decode_rate", "ready_s", "peak_memory"} <= names
    assert all(names >= set(variant["rounds"][0]) for variant in data["variants"])


def test_a_report_says_how_to_repeat_it(configured: CorralCli) -> None:
    page = configured.root / "r.html"
    words = ("--profiles", "base", "--workload", "generation", "--seed", "4")
    done = configured("bench", "tiny", *words, *ONCE, "--report", str(page))
    assert done.returncode == 0
    assert f"the report is in {page}" in done.stderr
    assert "corral bench tiny --seed 4 --profiles base --workload generation" in page.read_text()


def test_an_embedding_model_is_measured_by_embedding(corral: CorralCli, tmp_path: Path) -> None:
    model = tiny_bert.make(tmp_path / "bert.gguf", "mean")
    assert "many texts" in corral.ok("bench", str(model), *ONCE)


def test_a_model_that_ranks_texts_is_refused(corral: CorralCli, tmp_path: Path) -> None:
    done = corral("bench", str(tiny_bert.make(tmp_path / "rank.gguf", "rank")), *ONCE)
    assert done.returncode == 78
    assert "no workload suits rank" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["nothing"], 4, "no model is named"),
        (["tiny", "--profiles", "low-latencyy"], 78, "did you mean low-latency?"),
        (["tiny", "--workload", "caht"], 78, "did you mean chat?"),
        (["tiny", "--workload", "embedding"], 78, "makes no embeddings"),
        (["tiny", "--report", "gone/r.html"], 1, "cannot write the report"),
        (["tiny", "--repeats", "0"], 2, "--repeats"),
    ],
)
def test_a_mistake_is_named_before_anything_starts(
    configured: CorralCli, words: list[str], code: int, said: str
) -> None:
    done = configured("bench", *words)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert not (configured.root / "log").exists()


def test_a_daemon_is_not_disturbed(configured: CorralCli) -> None:
    configured.ok("start")
    before = configured.instances()["tiny.0"]
    done = configured("bench", "tiny", *ONCE, "--workload", "generation")
    assert done.returncode == 0
    assert "the daemon kept tiny" in done.stderr
    after = configured.instances()["tiny.0"]
    assert (after.pid, after.restarts, after.state) == (before.pid, 0, "ready")


def test_an_interrupt_keeps_the_measurements(configured: CorralCli) -> None:
    # The first start, and one for each round.
    with running(configured, 3, "--json") as process:
        process.send_signal(signal.SIGINT)
        stdout, _ = process.communicate(timeout=60)
    envelope = json.loads(stdout)
    assert process.returncode == envelope["exit_code"] == 130
    assert envelope["data"]["variants"][0]["rounds"][0]["generation.decode_rate"] > 0
    assert any(note.startswith("stopped after") for note in envelope["notes"])
    assert pids(configured) == set()


def test_killed_it_leaves_no_engine(configured: CorralCli) -> None:
    with running(configured, 1) as process:
        process.kill()
        process.wait()
        until(lambda: not pids(configured))
