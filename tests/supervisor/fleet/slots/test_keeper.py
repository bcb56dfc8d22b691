"""On the real engine: what is saved comes back, and what was harmed never reaches an engine."""

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_gguf
from fakes.barn import LONG, Barn
from fakes.slot_files import NOON

from supervisor.fleet.slots import keeping, saving
from supervisor.fleet.slots.manifest import Manifest, dump
from supervisor.fleet.slots.proof import Had
from supervisor.fleet.slots.restoring import Filled

Harm = Callable[[Barn, Manifest], None]


def file_of(barn: Barn, one: Manifest) -> Path:
    return barn.shelf.root / "kept" / one.model / f"{one.name}.slot"


async def test_a_conversation_goes_on_after_a_restart_as_if_there_had_been_none(
    tiny_model: Path, runtime: Path
) -> None:
    """The weights are random: with another cache the answer would be another."""
    barn = Barn(runtime, tiny_model)
    async with barn.up():
        messages = await barn.converse()
        expected, _ = await barn.ask(messages)
    (kept,) = barn.shelf.kept("chat")
    again = Barn(runtime, tiny_model)
    async with again.up():
        said, timings = await again.ask(messages)
    assert said == expected
    assert timings["cache_n"] >= kept.tokens - 20
    assert [one["tokens"] for one in again.told("slots.restored")] == [kept.tokens]


async def test_what_was_restored_and_not_used_is_not_saved_again(
    tiny_model: Path, runtime: Path
) -> None:
    barn = Barn(runtime, tiny_model)
    _, before = await barn.saved_one()
    async with barn.up():
        pass
    assert barn.shelf.kept("chat") == [before]
    assert len(barn.told("slots.saved")) == 1


async def test_two_conversations_come_back_into_slots_of_their_own(
    tiny_model: Path, runtime: Path
) -> None:
    barn = Barn(runtime, tiny_model)
    async with barn.up():
        turns = [await barn.converse("hello "), await barn.converse("other ")]
    assert len(barn.shelf.kept("chat")) == 2
    async with barn.up():
        for messages in turns:
            _, timings = await barn.ask(messages)
            assert timings["cache_n"] > 256
    assert [one["slots"] for one in barn.told("slots.restored")] == [2]


async def test_of_two_states_of_one_conversation_the_longer_is_kept(
    tiny_model: Path, runtime: Path
) -> None:
    barn = Barn(runtime, tiny_model)
    async with barn.up():
        messages = await barn.converse()
        await barn.save()
        (short,) = barn.shelf.kept("chat")
        await barn.ask(messages)
        await barn.save()
        (long,) = barn.shelf.kept("chat")
    assert long.tokens > short.tokens


async def test_files_are_private_and_bear_names_of_ours(tiny_model: Path, runtime: Path) -> None:
    barn = Barn(runtime, tiny_model)
    _, one = await barn.saved_one()
    path = file_of(barn, one)
    assert {oct(path.with_suffix(end).stat().st_mode & 0o777) for end in (".slot", ".json")} == {
        "0o600"
    }
    above = (path.parent, path.parent.parent, barn.shelf.root)
    assert {oct(directory.stat().st_mode & 0o777) for directory in above} == {"0o700"}
    assert len(one.name) == 16


def cut(share: float) -> Harm:
    def harm(barn: Barn, one: Manifest) -> None:
        os.truncate(file_of(barn, one), int(one.size_bytes * share))

    return harm


def flip(barn: Barn, one: Manifest) -> None:
    with file_of(barn, one).open("r+b") as file:
        file.seek(one.size_bytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def alter_manifest(barn: Barn, one: Manifest) -> None:
    path = file_of(barn, one).with_suffix(".json")
    path.write_text(dump(one).replace('"tokens": ', '"tokens": 1'))


def lose_file(barn: Barn, one: Manifest) -> None:
    file_of(barn, one).unlink()


@pytest.mark.parametrize(
    "harm",
    [cut(0.01), cut(0.5), cut(0.999), flip, alter_manifest, lose_file],
    ids=["1 %", "50 %", "99.9 %", "bit", "manifest", "gone"],
)
async def test_what_was_harmed_never_reaches_an_engine(
    tiny_model: Path, runtime: Path, harm: Harm
) -> None:
    barn = Barn(runtime, tiny_model)
    messages, one = await barn.saved_one()
    harm(barn, one)
    async with barn.up():
        _, timings = await barn.ask(messages)
        assert timings["cache_n"] < 256
    assert "restore" not in barn.log.partition("run 2,")[2]
    assert [told["file"] for told in barn.told("slots.quarantined")] == [one.name]
    assert barn.told("instance.exited")[-1]["code"] == 0
    assert one.name not in [kept.name for kept in barn.shelf.kept()]


CHANGES: dict[str, dict[str, object]] = {
    "cache": {"cache-type-k": "q8_0"},
    "slots": {"parallel": 1},
}


@pytest.mark.parametrize("change", ["model", *CHANGES])
async def test_what_belongs_to_something_else_never_reaches_an_engine(
    tiny_model: Path, tmp_path: Path, runtime: Path, change: str
) -> None:
    messages, one = await Barn(runtime, tiny_model).saved_one()
    model = tiny_gguf.make(tmp_path / "b.gguf", seed=1) if change == "model" else tiny_model
    barn = Barn(runtime, model, CHANGES.get(change))
    async with barn.up():
        _, timings = await barn.ask(messages)
    assert timings["cache_n"] < 256
    assert "restore" not in barn.log.partition("chat.0")[2].rpartition("run 1,")[2]
    assert [told["file"] for told in barn.told("slots.quarantined")] == [one.name]


async def test_files_swapped_between_two_models_reach_neither(
    tiny_model: Path, runtime: Path
) -> None:
    barn = Barn(runtime, tiny_model)
    messages, one = await barn.saved_one()
    other = barn.shelf.root / "kept" / "other"
    other.mkdir()
    for end in (".slot", ".json"):
        path = file_of(barn, one).with_suffix(end)
        path.rename(other / path.name)
    assert barn.shelf.kept("other") == []
    async with barn.up():
        _, timings = await barn.ask(messages)
    assert timings["cache_n"] == 0
    assert [told.name for told in barn.shelf.weed()] == [one.name]


async def test_an_engine_that_dies_of_a_file_is_not_handed_it_twice(
    tiny_model: Path, runtime: Path
) -> None:
    barn = Barn(runtime, tiny_model)
    messages, one = await barn.saved_one()
    # As a daemon leaves it whose engine was given the file and did not answer any more.
    os.link(file_of(barn, one), barn.shelf.spool("chat.0") / f"{one.name}.slot")
    async with barn.up():
        _, timings = await barn.ask(messages)
    assert timings["cache_n"] == 0
    assert "did not answer" in barn.told("slots.quarantined")[0]["why"]


async def test_a_disk_without_room_is_told_and_nothing_is_left(
    tiny_model: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    barn = Barn(runtime, tiny_model)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("supervisor.fleet.slots.shelf.write_whole", full)
    async with barn.up():
        await barn.converse()
        await barn.save()
        _, timings = await barn.ask([{"role": "user", "content": "still there"}])
        assert timings["predicted_n"] > 0
    assert "No space left" in barn.told("slots.unsaved")[0]["why"]
    assert not [*barn.shelf.root.rglob("*.slot"), *barn.shelf.root.rglob("*.new")]


async def test_too_little_room_is_seen_before_anything_is_written(
    tiny_model: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_RESERVE_BYTES", 1 << 60)
    barn = Barn(runtime, tiny_model)
    async with barn.up():
        await barn.converse()
    assert "save" not in barn.log.partition("chat.0.log")[2]
    assert not barn.shelf.kept()


async def test_a_stopped_engine_holds_up_a_stop_no_longer_than_its_time(
    tiny_model: Path, runtime: Path
) -> None:
    barn = Barn(runtime, tiny_model, supervisor={"save_timeout_s": 0.5})
    async with barn.up():
        await barn.converse()
        pid = barn.replica.instance.snapshot().pid
        assert pid
        os.kill(pid, signal.SIGSTOP)
        began_at_s = asyncio.get_running_loop().time()
        await barn.save()
        assert asyncio.get_running_loop().time() - began_at_s < 3
        os.kill(pid, signal.SIGCONT)
    assert "save_timeout_s" in barn.told("slots.unsaved")[0]["why"]


@pytest.fixture
def windowed_model(tmp_path: Path) -> Path:
    """Return a model most of whose layers look back 64 tokens."""
    return tiny_gguf.make(tmp_path / "window.gguf", layers=6, window=64)


async def test_a_window_that_is_whole_goes_on_after_a_restart(
    windowed_model: Path, runtime: Path
) -> None:
    barn = Barn(runtime, windowed_model, {"swa-full": True})
    messages, kept = await barn.saved_one()
    async with barn.up():
        _, timings = await barn.ask(messages)
    assert timings["cache_n"] >= kept.tokens - 20


async def test_one_that_slides_is_not_kept_and_would_be_read_anew(
    windowed_model: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    barn = Barn(runtime, windowed_model)
    async with barn.up():
        await barn.converse()
    assert "its sliding window is not saved" in (barn.replica.keeper.reason or "")
    assert not barn.shelf.kept()
    monkeypatch.setattr(keeping, "reason_against", lambda _plan: None)
    again = Barn(runtime, windowed_model)
    messages, _ = await again.saved_one()
    async with again.up():
        _, timings = await again.ask(messages)
    assert len(again.told("slots.restored")) == 1
    assert timings["cache_n"] == 0


async def test_one_setting_turns_it_off(tiny_model: Path, runtime: Path) -> None:
    barn = Barn(runtime, tiny_model, supervisor={"keep_slots": False})
    async with barn.up():
        await barn.converse()
    assert "--slot-save-path" not in barn.log
    assert not barn.shelf.kept()
    assert barn.replica.keeper.reason == "keep_slots is false"


async def prove(barn: Barn, id_slot: int, cached: int) -> None:
    async with barn.llama() as llama:
        await barn.replica.keeper.prove(
            llama, barn.replica.instance.snapshot().run, id_slot, Had(10_000, cached)
        )


async def begun(barn: Barn) -> Filled:
    """Return the one slot that the run began with."""
    run = barn.replica.instance.snapshot().run
    (one,) = (found for found in barn.replica.keeper.begun(run) if found.kept)
    assert not barn.replica.keeper.begun(run + 1)
    return one


async def test_what_was_not_used_is_told_and_not_tried_again(
    tiny_model: Path, runtime: Path
) -> None:
    barn = Barn(runtime, tiny_model)
    messages, kept = await barn.saved_one()
    async with barn.up():
        slot = (await begun(barn)).id_slot
        await barn.ask(messages, slot)
        assert not barn.replica.keeper.doubts(slot, Had(10_000, kept.tokens))
        assert not barn.replica.keeper.doubts(slot + 1, Had(10_000, 0))
        assert barn.replica.keeper.doubts(slot, Had(10_000, 3))
        await prove(barn, slot, kept.tokens)
        assert barn.replica.keeper.reason is None
        await prove(barn, slot, 3)
    (told,) = barn.told("slots.disproved")
    assert (told["cached"], told["expected"] > 0.9 * kept.tokens) == (3, True)
    assert "corral slots forget chat" in str(barn.replica.keeper.reason)
    again = Barn(runtime, tiny_model)  # as the next daemon
    async with again.up():
        _, timings = await again.ask(messages)
    assert timings["cache_n"] == 0
    assert not again.told("slots.restored")
    again.shelf.forget("chat")
    assert again.replica.keeper.reason is None


async def test_a_prompt_that_is_another_proves_nothing(tiny_model: Path, runtime: Path) -> None:
    barn = Barn(runtime, tiny_model)
    await barn.saved_one()
    async with barn.up():
        slot = (await begun(barn)).id_slot
        await barn.ask([{"role": "user", "content": f"on another day {LONG}"}], slot)
        await prove(barn, slot, 3)
        assert barn.replica.keeper.reason is None
    assert not barn.told("slots.disproved")


async def test_what_is_gone_from_the_shelf_proves_nothing(tiny_model: Path, runtime: Path) -> None:
    barn = Barn(runtime, tiny_model)
    messages, _ = await barn.saved_one()
    async with barn.up():
        slot = (await begun(barn)).id_slot
        await barn.ask(messages, slot)
        barn.shelf.forget()
        await prove(barn, slot, 3)
        assert barn.replica.keeper.reason is None


async def test_what_is_forgotten_is_gone(tiny_model: Path, runtime: Path) -> None:
    barn = Barn(runtime, tiny_model)
    _, one = await barn.saved_one()
    assert barn.shelf.forget("other") == []
    assert [found.name for found in barn.shelf.forget("chat")] == [one.name]
    assert not [path for path in barn.shelf.root.rglob("*") if path.is_file()]


async def test_a_directory_that_cannot_be_made_does_not_keep_a_model_from_starting(
    tiny_model: Path, runtime: Path
) -> None:
    (runtime / "slots").write_text("in the way")
    barn = Barn(runtime, tiny_model)
    async with barn.up():
        await barn.converse()
    assert "--slot-save-path" not in barn.log


async def test_what_the_proxy_calls_a_conversation_is_kept_with_it(
    tiny_model: Path, runtime: Path
) -> None:
    barn = Barn(runtime, tiny_model)
    barn.fleet.chains = lambda _, slots: {
        slot.id_slot: f"{slot.tokens}" for slot in slots if slot.tokens > 256
    }
    _, kept = await barn.saved_one()
    assert kept.chain == f"{kept.tokens}"
    async with barn.up():
        assert (await begun(barn)).kept == kept


@pytest.mark.parametrize(
    ("flags", "page"),
    [
        ({"parallel": 2}, "names it"),
        ({"parallel": 2}, "takes no number"),
        ({"parallel": 1, "cache-ram": 0}, "takes no number"),
    ],
)
async def test_every_slot_that_was_filled_still_holds_it_when_asked(
    tiny_model: Path, runtime: Path, flags: dict[str, int], page: str
) -> None:
    barn = Barn(runtime, tiny_model, flags)
    async with barn.up():
        turns = [await barn.converse(f"{number} ") for number in range(flags["parallel"])]
    async with barn.up():
        found = barn.replica.keeper.begun(barn.replica.instance.snapshot().run)
        order = sorted(found, key=lambda one: one.kept.used_at if one.kept else NOON)
        for messages, one in zip(turns, order, strict=True):
            _, timings = await barn.ask(messages, one.id_slot if page == "names it" else None)
            assert one.kept
            assert timings["cache_n"] >= 0.95 * one.kept.tokens
