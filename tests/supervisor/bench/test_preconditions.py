"""Obstacles to a measurement, and their names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.samples import GIB

from supervisor.bench.variants import (
    LoadedModel,
    MachineFacts,
    VariantSpec,
    check,
    choose,
    note_on_load,
    notes,
    obstacles,
)
from supervisor.errors import MachineBusy
from supervisor.plan.fit import MemoryCapacity
from supervisor.settings.schema import Settings
from supervisor.system.paths import Directories
from supervisor.system.processor_load import busy_programs

FREE = MachineFacts(MemoryCapacity(8 * GIB, {}), 6 * GIB, 8, (), ())
CHAT = LoadedModel("chat", 2 * GIB, 1, (77,))


@pytest.fixture
def specs(tiny_model: Path, runtime: Path) -> tuple[VariantSpec, ...]:
    where = Directories(*[runtime] * 5)
    return choose(Settings(models={"tiny": {"path": tiny_model}}), where, "tiny", [])


def test_a_free_machine_has_nothing_in_the_way(specs: tuple[VariantSpec, ...]) -> None:
    check(FREE, specs)
    background = tuple((n, "sshd", 0.06) for n in range(3))
    check(replace(FREE, programs=background), specs)


def test_a_busy_program_is_named(specs: tuple[VariantSpec, ...]) -> None:
    facts = replace(FREE, programs=((12, "make", 1.96), (13, "cc", 0.4)))
    with pytest.raises(MachineBusy, match=r"make \(pid 12\) takes 2.0 cores; cc .*0.4") as caught:
        check(facts, specs)
    assert "--force" in (caught.value.hint or "")


def test_the_daemons_own_engine_is_named_by_its_model(specs: tuple[VariantSpec, ...]) -> None:
    facts = replace(FREE, programs=((77, "llama-server", 3),), loaded=(CHAT,))
    with pytest.raises(MachineBusy, match="the daemon's chat takes 3") as caught:
        check(facts, specs)
    assert "corral unload chat" in (caught.value.hint or "")


def test_too_little_free_memory_names_who_holds_it(specs: tuple[VariantSpec, ...]) -> None:
    found = obstacles(replace(FREE, available_bytes=1024**2, loaded=(CHAT,)), specs)
    assert len(found) == len(specs)
    assert "1.0 MiB are free (the daemon holds chat (2.0 GiB, 1 requests running))" in found[0]


def test_what_can_never_fit_is_said_for_each_variant(specs: tuple[VariantSpec, ...]) -> None:
    found = obstacles(replace(FREE, capacity=MemoryCapacity(1024, {})), specs)
    assert [entry.split()[0] for entry in found] == [spec.name for spec in specs]
    assert all("can never fit" in entry for entry in found)


def test_an_idle_daemon_is_no_obstacle_but_a_note(specs: tuple[VariantSpec, ...]) -> None:
    facts = replace(FREE, loaded=(replace(CHAT, slots_busy=0),))
    check(facts, specs)
    assert list(notes(facts)) == ["the daemon kept chat (2.0 GiB) in memory meanwhile"]


def test_what_others_took_meanwhile_is_noted() -> None:
    assert note_on_load([0.0, 0.15], 2) is None
    assert note_on_load([], 2) is None
    found = note_on_load([0.1, 1.26, 0.5], 2)
    assert found
    assert found.startswith("other programs took up to 1.3 cores, in 2 of 3 measurements")
    assert note_on_load([2.0], 64) is None


def test_this_process_is_not_in_its_own_way() -> None:
    assert all(cores > 0 and name for _, name, cores in busy_programs(0.02))
