"""Saving and restoring slots on the real engine."""

import asyncio
import copy
import os
import shutil
import signal
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import tiny_gguf, tiny_hybrid
from support.fleet_harness import FleetHarness

from proxy.cache.fingerprint import ConversationFingerprint, RestoredSlot
from proxy.upstream.upstream import Timings
from supervisor.engine import client as client_module
from supervisor.engine.client import EngineClient, EngineUnreachable, ErrorResponse, SlotFileInfo
from supervisor.errors import SaveFailed
from supervisor.fleet import cache_commands
from supervisor.slot_store.file_index import CataloguedFile
from supervisor.slot_store.manager import SlotManager
from supervisor.slot_store.manifest import Manifest, dump
from supervisor.slot_store.slot_file import SlotFileHeader
from supervisor.slot_store.slot_files import SlotFiles
from supervisor.slot_store.store import RestoreOutcome, SlotStore

Harm = Callable[[FleetHarness, Manifest], None]


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the operations on slot files that engines get: `save`, `restore`, in order."""
    asked: list[str] = []

    def record(name: str) -> None:
        transfer = getattr(client_module, name)

        def recorded(*arguments: object) -> object:
            asked.append(name)
            return transfer(*arguments)

        monkeypatch.setattr(client_module, name, recorded)

    record("save")
    record("restore")
    return asked


def file_of(harness: FleetHarness, manifest: Manifest) -> Path:
    return harness.store.root / "kept" / manifest.model / f"{manifest.name}.slot"


async def test_a_conversation_continues_after_a_restart_with_the_same_text(
    tiny_model: Path, runtime: Path
) -> None:
    """The weights are random: with another cache the answer would be another."""
    harness = FleetHarness(runtime, tiny_model)
    async with harness.up():
        messages = await harness.converse()
        expected, _ = await harness.ask(messages)
    (kept,) = harness.store.list_saved("chat")
    again = FleetHarness(runtime, tiny_model)
    async with again.up():
        said, timings = await again.ask(messages)
    assert said == expected
    assert timings["cache_n"] >= kept.tokens - 20
    assert [event["tokens"] for event in again.emitted("slots.restored")] == [kept.tokens]


async def test_an_unused_restored_slot_is_not_saved_again(tiny_model: Path, runtime: Path) -> None:
    harness = FleetHarness(runtime, tiny_model)
    _, before = await harness.saved_one()
    async with harness.up():
        pass
    assert harness.store.list_saved("chat") == [before]
    assert len(harness.emitted("slots.saved")) == 1


async def test_two_conversations_are_restored_into_two_slots(
    tiny_model: Path, runtime: Path
) -> None:
    harness = FleetHarness(runtime, tiny_model)
    async with harness.up():
        turns = [await harness.converse("hello "), await harness.converse("other ")]
    assert len(harness.store.list_saved("chat")) == 2
    async with harness.up():
        for messages in turns:
            _, timings = await harness.ask(messages)
            assert timings["cache_n"] > 256
    assert [event["slots"] for event in harness.emitted("slots.restored")] == [2]


async def test_of_two_states_of_one_conversation_the_longer_is_kept(
    tiny_model: Path, runtime: Path
) -> None:
    harness = FleetHarness(runtime, tiny_model)
    async with harness.up():
        messages = await harness.converse()
        await harness.save()
        (short,) = harness.store.list_saved("chat")
        await harness.ask(messages)
        await harness.save()
        (long,) = harness.store.list_saved("chat")
    assert long.tokens > short.tokens


async def test_files_are_private_and_have_random_names(tiny_model: Path, runtime: Path) -> None:
    harness = FleetHarness(runtime, tiny_model)
    _, one = await harness.saved_one()
    path = file_of(harness, one)
    assert {oct(path.with_suffix(end).stat().st_mode & 0o777) for end in (".slot", ".json")} == {
        "0o600"
    }
    above = (path.parent, path.parent.parent, harness.store.root)
    assert {oct(directory.stat().st_mode & 0o777) for directory in above} == {"0o700"}
    assert len(one.name) == 16


def cut(share: float) -> Harm:
    def harm(harness: FleetHarness, manifest: Manifest) -> None:
        os.truncate(file_of(harness, manifest), int(manifest.size_bytes * share))

    return harm


def flip(harness: FleetHarness, manifest: Manifest) -> None:
    with file_of(harness, manifest).open("r+b") as file:
        file.seek(manifest.size_bytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def alter_manifest(harness: FleetHarness, manifest: Manifest) -> None:
    path = file_of(harness, manifest).with_suffix(".json")
    path.write_text(dump(manifest).replace('"tokens": ', '"tokens": 1'))


def lose_file(harness: FleetHarness, manifest: Manifest) -> None:
    file_of(harness, manifest).unlink()


@pytest.mark.parametrize(
    "harm",
    [cut(0.01), cut(0.5), cut(0.999), flip, alter_manifest, lose_file],
    ids=["1 %", "50 %", "99.9 %", "bit", "manifest", "gone"],
)
async def test_a_damaged_file_never_reaches_an_engine(
    tiny_model: Path, runtime: Path, transfers: list[str], harm: Harm
) -> None:
    harness = FleetHarness(runtime, tiny_model)
    messages, one = await harness.saved_one()
    harm(harness, one)
    async with harness.up():
        _, timings = await harness.ask(messages)
        assert timings["cache_n"] < 256
    assert "restore" not in transfers
    assert [emitted["file"] for emitted in harness.emitted("slots.quarantined")] == [one.name]
    assert harness.emitted("instance.exited")[-1]["code"] == 0
    assert one.name not in [kept.name for kept in harness.store.list_saved()]


CHANGES: dict[str, dict[str, object]] = {
    "cache": {"cache-type-k": "q8_0"},
    "slots": {"parallel": 1, "kv-unified": True},
}


@pytest.mark.parametrize("change", ["model", *CHANGES])
async def test_a_file_with_another_cache_key_never_reaches_an_engine(
    tiny_model: Path, tmp_path: Path, runtime: Path, transfers: list[str], change: str
) -> None:
    messages, one = await FleetHarness(runtime, tiny_model).saved_one()
    model = tiny_gguf.make(tmp_path / "b.gguf", seed=1) if change == "model" else tiny_model
    harness = FleetHarness(runtime, model, CHANGES.get(change))
    async with harness.up():
        _, timings = await harness.ask(messages)
    assert timings["cache_n"] < 256
    assert "restore" not in transfers
    assert not harness.emitted("slots.quarantined")  # the settings may come back
    assert one.name in {kept.name for kept in harness.store.list_saved()}


async def test_files_swapped_between_two_models_reach_neither(
    tiny_model: Path, runtime: Path
) -> None:
    harness = FleetHarness(runtime, tiny_model)
    messages, one = await harness.saved_one()
    other = harness.store.root / "kept" / "other"
    other.mkdir()
    for end in (".slot", ".json"):
        path = file_of(harness, one).with_suffix(end)
        path.rename(other / path.name)
    assert harness.store.list_saved("other") == []
    async with harness.up():
        _, timings = await harness.ask(messages)
    assert timings["cache_n"] == 0
    assert [event["file"] for event in harness.emitted("slots.quarantined")] == [one.name]


async def test_a_file_that_an_engine_crashed_on_is_not_restored_again(
    tiny_model: Path, runtime: Path
) -> None:
    harness = FleetHarness(runtime, tiny_model)
    messages, one = await harness.saved_one()
    # As a daemon leaves it whose engine was given the file and did not answer any more.
    os.link(file_of(harness, one), harness.store.spool("chat.0") / f"{one.name}.slot")
    async with harness.up():
        _, timings = await harness.ask(messages)
    assert timings["cache_n"] == 0
    assert "did not answer" in harness.emitted("slots.quarantined")[0]["reason"]


async def test_a_full_disk_is_reported_and_leaves_no_file(
    tiny_model: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = FleetHarness(runtime, tiny_model)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("supervisor.slot_store.store.write_atomic", full)
    async with harness.up():
        await harness.converse()
        persistence = harness.planner.launches.slot_persistence
        found = await cache_commands.save([harness.replica], persistence)
        assert isinstance(found, SaveFailed)
        assert "chat.0: [Errno 28] No space left on device; more is saved in 60 s" in found.message
        _, timings = await harness.ask([{"role": "user", "content": "still there"}])
        assert timings["predicted_n"] > 0
    assert "No space left" in harness.emitted("slots.save_failed")[0]["reason"]
    assert not [*harness.store.root.rglob("*.slot"), *harness.store.root.rglob("*.new")]


async def test_a_disk_that_does_not_answer_is_one_warning_until_it_does(
    tiny_model: Path, runtime: Path
) -> None:
    harness = FleetHarness(runtime, tiny_model)
    async with harness.up():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shutil, "disk_usage", _fail)
            for _ in range(3):  # as idle engines do
                (failure,) = await _save(harness)
                assert "has not answered" in failure
        assert len(harness.emitted("slots.save_failed")) == 1
        assert not await _save(harness)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shutil, "disk_usage", _fail)
            assert await _save(harness)
        assert len(harness.emitted("slots.save_failed")) == 2


def _fail(_: object) -> None:
    raise OSError("the directory has not answered")


async def _save(harness: FleetHarness) -> Sequence[str]:
    async with harness.client() as client:
        return await harness.replica.slots.save(client, harness.replica.instance.snapshot().run)


async def test_nothing_is_written_to_a_nearly_full_disk(
    tiny_model: Path, runtime: Path, transfers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(runtime)._replace(free=200 * 1024**2)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    harness = FleetHarness(runtime, tiny_model)
    async with harness.up():
        await harness.converse()
    assert not transfers
    assert not harness.store.list_saved()


async def test_saving_from_a_suspended_engine_times_out(tiny_model: Path, runtime: Path) -> None:
    harness = FleetHarness(runtime, tiny_model, supervisor={"slot_save_timeout_s": 0.5})
    async with harness.up():
        await harness.converse()
        pid = harness.replica.instance.snapshot().pid
        assert pid
        os.kill(pid, signal.SIGSTOP)
        began_at_s = asyncio.get_running_loop().time()
        await harness.save()
        assert asyncio.get_running_loop().time() - began_at_s < 3
        os.kill(pid, signal.SIGCONT)
    assert "slot_save_timeout_s" in harness.emitted("slots.save_failed")[0]["reason"]


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_successor_does_not_wait_for_a_predecessor_that_hangs(
    tiny_model: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch, *, hangs: bool
) -> None:
    harness = FleetHarness(runtime, tiny_model)
    async with harness.up():
        await harness.converse()
        pid = harness.replica.instance.snapshot().pid
        assert pid
        if hangs:
            monkeypatch.setattr(cache_commands, "_LISTED_TIMEOUT_S", 0.1)
            os.kill(pid, signal.SIGSTOP)
        successor = copy.copy(harness.replica)
        await cache_commands.save_predecessors(harness.fleet.models["chat"], successor)
        assert len(harness.emitted("slots.saved")) == (not hangs)
        assert not harness.emitted("slots.save_failed")
        os.kill(pid, signal.SIGCONT)


@pytest.fixture
def windowed_model(tmp_path: Path) -> Path:
    """Return a model most of whose layers look back 64 tokens."""
    return tiny_gguf.make(tmp_path / "window.gguf", layers=6, window=64)


@pytest.mark.parametrize(
    ("flags", "parallel"),
    [
        ({}, 2),
        ({}, 4),
        ({"flash-attn": "off", "cache-type-v": "f16"}, 2),
        ({"swa-full": True}, 2),
        ({"swa-full": True}, 4),
    ],
)
async def test_a_sliding_window_is_restored_also_with_other_slots(
    windowed_model: Path, runtime: Path, flags: dict[str, Any], parallel: int
) -> None:
    """The weights are random: with another cache the answer would be another."""
    prompt = [1, *(270 + number % 100 for number in range(400))]
    first = FleetHarness(runtime, windowed_model, {**flags, "parallel": 2, "ctx-size": 4096})
    async with first.up():
        prompt += (await first.complete(prompt, id_slot=1))["tokens"]
    sizes = {"parallel": parallel, "ctx-size": 2048 * parallel}
    second = FleetHarness(runtime, windowed_model, {**flags, **sizes})
    async with second.up():
        (held,) = (slot for slot in second.replica.slots.restored_slots(1) if slot.tokens)
        restored = await second.complete([*prompt, 300], id_slot=held.id_slot)
        computed = await second.complete([*prompt, 300], cache_prompt=False)
    assert restored["timings"]["cache_n"] == held.tokens > 400
    assert restored["tokens"] == computed["tokens"]
    assert not second.emitted("slots.quarantined")


async def test_a_conversation_is_restored_into_a_slot_whose_draft_cache_is_shorter(
    runtime: Path, tmp_path: Path
) -> None:
    model = tiny_gguf.make(tmp_path / "model.gguf", embd=128, layers=4, seed=1)
    draft = tiny_gguf.make(tmp_path / "draft.gguf", seed=2)
    flags = {"spec-draft-model": str(draft), "spec-type": "draft-simple", "spec-draft-p-min": 0}
    harness = FleetHarness(runtime, model, {**flags, "cache-ram": "auto", "parallel": 2})
    long, short = ([1, *(270 + n * step % 100 for n in range(400 // step))] for step in (1, 4))
    async with harness.up():
        long += (await harness.complete(long, id_slot=0))["tokens"]
        await harness.save()
        (kept,) = harness.store.list_saved()
        await harness.complete(short, id_slot=1)
        manager, run = harness.replica.slots, harness.replica.instance.snapshot().run
        async with harness.client() as client:
            assert await manager.restore_slot(client, run, 1, kept.name)
        found = await harness.complete([*long, 300], id_slot=1)
        assert found["timings"]["cache_n"] == kept.tokens > 400
        computed = await harness.complete([*long, 300], cache_prompt=False)
    assert found["tokens"] == computed["tokens"]


async def test_a_conversation_shorter_than_the_window_is_not_saved(
    runtime: Path, tmp_path: Path
) -> None:
    model = tiny_gguf.make(tmp_path / "wide.gguf", layers=6, window=1024)
    harness = FleetHarness(runtime, model)
    async with harness.up():
        await harness.converse()
    assert not harness.store.list_saved()
    assert harness.replica.slots.reason is None


async def test_a_window_of_an_unknown_layout_is_not_saved_again(
    windowed_model: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness, save = FleetHarness(runtime, windowed_model), client_module.save

    async def save_longer(client: EngineClient, id_slot: int, name: str) -> Any:
        written = await save(client, id_slot, name)
        assert isinstance(written, SlotFileInfo)
        with (harness.store.spool_path(harness.replica.name) / name).open("ab") as file:
            file.write(b"more")
        return replace(written, size_bytes=written.size_bytes + 4)

    monkeypatch.setattr(client_module, "save", save_longer)
    async with harness.up():
        await harness.converse()
        await harness.save()
        assert "unknown layout" in str(harness.replica.slots.reason)
    assert not harness.store.list_saved()
    harness.store.forget("chat")
    assert harness.replica.slots.reason is None


@pytest.mark.parametrize("flags", [{}, {"spec-type": "draft-mtp"}], ids=["alone", "drafts"])
async def test_the_first_restore_of_a_hybrid_model_proves_that_its_engine_uses_it(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, str]
) -> None:
    """The weights are random: with another state the answer would be another."""
    ask, tried = client_module.cached_tokens, list[int]()

    async def count(client: EngineClient, id_slot: int, prompt: Sequence[int]) -> Any:
        tried.append(len(prompt))
        return await ask(client, id_slot, prompt)

    monkeypatch.setattr(client_module, "cached_tokens", count)
    model = tiny_hybrid.make(tmp_path / "hybrid.gguf", drafts=True)
    prompt = [1, *(270 + number % 100 for number in range(400))]
    harness = FleetHarness(runtime, model, flags)
    async with harness.up():
        prompt += (await harness.complete(prompt))["tokens"]
    (kept,) = harness.store.list_saved("chat")
    again = FleetHarness(runtime, model, flags)
    async with again.up():
        slot = (await begun(again)).id_slot
        restored = await again.complete([*prompt, 300], id_slot=slot)
        computed = await again.complete([*prompt, 300], cache_prompt=False)
        assert again.replica.plan
        outcome = again.planner.launches.slot_persistence.outcome(again.replica.plan)
    assert restored["timings"]["cache_n"] == kept.tokens == len(prompt) - 1
    assert restored["tokens"] == computed["tokens"]
    assert outcome == RestoreOutcome("chat", kept.tokens, kept.tokens)
    later = FleetHarness(runtime, model, flags)
    async with later.up():
        await begun(later)
    assert tried == [kept.tokens + 1]


async def test_a_setting_turns_saving_off(tiny_model: Path, runtime: Path) -> None:
    harness = FleetHarness(runtime, tiny_model, supervisor={"persist_slots": False})
    async with harness.up():
        await harness.converse()
    assert "--slot-save-path" not in harness.log
    assert not harness.store.list_saved()
    assert harness.replica.slots.reason == "persist_slots is false"


async def begun(harness: FleetHarness) -> RestoredSlot:
    """Return the one slot that the run began with."""
    run = harness.replica.instance.snapshot().run
    (one,) = (found for found in harness.replica.slots.restored_slots(run) if found.tokens)
    assert not harness.replica.slots.restored_slots(run + 1)
    return one


def timings(cached: int, prompt: int = 1000) -> Timings:
    return Timings(cached, prompt - cached, 1.0, 1, 1.0)


def put_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all files hold a picture, so that no restore can be tried with their tokens."""
    header = SlotStore.header

    def with_picture(store: SlotStore, manifest: Manifest) -> SlotFileHeader:
        return replace(header(store, manifest), media=((0, "a hash"),))

    monkeypatch.setattr(SlotStore, "header", with_picture)


async def test_the_first_response_counts_where_no_restore_could_be_tried(
    tiny_model: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_pictures(monkeypatch)
    harness = FleetHarness(runtime, tiny_model)
    messages, kept = await harness.saved_one()
    async with harness.up():
        await begun(harness)
        manager = harness.replica.slots
        for _ in range(2):
            assert manager.check_restore(kept.tokens, timings(0, prompt=255))  # too short to tell
        assert manager.check_restore(kept.tokens, timings(0))
        assert not harness.emitted("slots.restore_unused")
        assert not manager.check_restore(kept.tokens, timings(0))
    (event,) = harness.emitted("slots.restore_unused")
    assert (event["cached"], event["expected"]) == (0, kept.tokens)
    again = FleetHarness(runtime, tiny_model)  # as the next daemon
    async with again.up():
        _, found = await again.ask(messages)
        assert again.replica.slots.check_restore(kept.tokens, timings(kept.tokens))
    assert found["cache_n"] == 0
    assert not again.emitted("slots.restored")


async def test_one_token_proves_that_restored_slots_are_used(
    tiny_model: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_pictures(monkeypatch)
    harness = FleetHarness(runtime, tiny_model)
    _, kept = await harness.saved_one()
    async with harness.up():
        check = harness.replica.slots.check_restore
        # Another prompt, with another date.
        assert all(check(kept.tokens, timings(cached)) for cached in (0, 1, 0, 0))
    assert harness.replica.slots.reason is None


async def test_an_engine_that_ends_over_the_first_restore_is_not_given_another(
    tiny_model: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ends(*_: object) -> int:
        raise EngineUnreachable("it ended")

    harness = FleetHarness(runtime, tiny_model)
    await harness.saved_one()
    monkeypatch.setattr(client_module, "cached_tokens", ends)
    async with harness.up():
        assert "its engine ended" in str(harness.replica.slots.reason)
    assert not harness.emitted("slots.restored")


@pytest.mark.parametrize(
    ("response", "problem"),
    [
        (ErrorResponse(500, "decode() failed"), "failed over a restored conversation: decode() f"),
        (ErrorResponse(200, "no timings"), ""),
        (ErrorResponse(400, "too long"), ""),
    ],
)
async def test_an_engine_that_fails_over_the_first_restore_is_not_given_another(
    tiny_model: Path,
    runtime: Path,
    monkeypatch: pytest.MonkeyPatch,
    response: ErrorResponse,
    problem: str,
) -> None:
    async def fail(*_: object) -> ErrorResponse:
        return response

    harness = FleetHarness(runtime, tiny_model)
    await harness.saved_one()
    monkeypatch.setattr(client_module, "cached_tokens", fail)
    async with harness.up():
        assert problem in (harness.replica.slots.reason or "")
    assert bool(harness.emitted("slots.restored")) == (not problem)


async def test_a_build_that_refuses_to_save_is_not_asked_again(
    tiny_model: Path, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> ErrorResponse:
        return ErrorResponse(501, "not supported by multimodal")

    monkeypatch.setattr(client_module, "save", refuse)
    harness = FleetHarness(runtime, tiny_model)
    async with harness.up():
        await harness.converse()
        await harness.save()
        assert "does not save them: not supported" in str(harness.replica.slots.reason)
    assert len(harness.emitted("slots.save_failed")) == 1


async def test_forget_deletes_the_files(tiny_model: Path, runtime: Path) -> None:
    harness = FleetHarness(runtime, tiny_model)
    _, one = await harness.saved_one()
    assert harness.store.forget("other") == []
    assert [found.name for found in harness.store.forget("chat")] == [one.name]
    assert not [path for path in harness.store.root.rglob("*") if path.is_file()]


async def test_a_model_starts_without_a_spool_directory(tiny_model: Path, runtime: Path) -> None:
    (runtime / "slots").write_text("in the way")
    harness = FleetHarness(runtime, tiny_model)
    async with harness.up():
        await harness.converse()
    assert "--slot-save-path" not in harness.log


@pytest.mark.parametrize(("hashes", "is_kept"), [(1, True), (20_000, False)])
async def test_the_fingerprint_of_a_conversation_is_saved_unless_it_is_too_long(
    tiny_model: Path, runtime: Path, hashes: int, *, is_kept: bool
) -> None:
    harness = FleetHarness(runtime, tiny_model)
    fingerprint = ConversationFingerprint(tuple(range(hashes)))
    harness.traffic.fingerprints = lambda _, slots: {
        slot.id_slot: fingerprint for slot in slots if slot.tokens > 256
    }
    _, kept = await harness.saved_one()
    async with harness.up():
        found = await begun(harness)
    assert found.tokens == kept.tokens
    assert found.fingerprint == (fingerprint if is_kept else ConversationFingerprint())


async def test_a_conversation_that_another_replica_has_is_not_restored(
    tiny_model: Path, runtime: Path
) -> None:
    harness = FleetHarness(runtime, tiny_model)
    fingerprint = ConversationFingerprint((7,), (8,))
    harness.traffic.fingerprints = lambda _, slots: {slot.id_slot: fingerprint for slot in slots}
    await harness.saved_one()
    elsewhere: list[ConversationFingerprint] = []

    async def nothing() -> None: ...

    manager = SlotManager(
        instance="chat.0",
        model="chat",
        replica=lambda: (0, 1),
        plan=lambda: harness.replica.plan,
        persistence=lambda: harness.planner.launches.slot_persistence,
        files=harness.fleet.slot_files,
        fingerprints=lambda _: {},
        is_elsewhere=elsewhere.__contains__,
        save_predecessors=nothing,
        emit=lambda _name, /, **_fields: None,
    )
    async with harness.up(), harness.client() as client:
        assert await manager.restore(client, 1) == 1
        elsewhere.append(fingerprint)
        assert await manager.restore(client, 1) == 0


@pytest.mark.parametrize(
    ("flags", "page"),
    [
        ({"parallel": 2}, "names it"),
        ({"parallel": 2}, "takes no number"),
        ({"parallel": 1, "cache-ram": 0}, "takes no number"),
    ],
)
async def test_every_restored_slot_is_used(
    tiny_model: Path, runtime: Path, flags: dict[str, int], page: str
) -> None:
    harness = FleetHarness(runtime, tiny_model, flags)
    harness.traffic.fingerprints = lambda _, slots: {
        slot.id_slot: ConversationFingerprint((slot.task,)) for slot in slots if slot.tokens > 256
    }
    async with harness.up():
        turns = [await harness.converse(f"{number} ") for number in range(flags["parallel"])]
    async with harness.up():
        found = harness.replica.slots.restored_slots(harness.replica.instance.snapshot().run)
        order = sorted(found, key=lambda entry: entry.fingerprint.turn_hashes)
        for messages, entry in zip(turns, order, strict=True):
            _, timings = await harness.ask(messages, entry.id_slot if page == "names it" else None)
            assert timings["cache_n"] >= 0.95 * entry.tokens > 0


async def test_a_shared_directory_that_hangs_delays_no_further_restore(
    tiny_model: Path, runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = {"slots_directory": tmp_path / "shared"}
    harness = FleetHarness(runtime, tiny_model, supervisor=shared)
    _, saved = await harness.saved_one()
    may_end, check_out = threading.Event(), SlotStore.check_out

    def hang(*given: Any) -> Path:
        may_end.wait()
        return check_out(*given)

    async with harness.up(), harness.client() as client:
        monkeypatch.setattr(SlotStore, "check_out", hang)
        monkeypatch.setattr(SlotFiles, "read_limit_s", lambda *_: 0.05)
        slots, run = harness.replica.slots, harness.replica.instance.snapshot().run
        assert await slots.restore_slot(client, run, 0, saved.name) is None
        assert "was given up after" in harness.emitted("slots.restore_failed")[0]["reason"]
        monkeypatch.setattr(SlotStore, "check_out", check_out)
        assert await slots.restore_slot(client, run, 0, saved.name) is None  # for a minute
        may_end.set()
    assert len(harness.emitted("slots.restore_failed")) == 1
    assert not harness.emitted("slots.quarantined")
    assert harness.store.list_saved() == [saved]


async def test_a_start_reads_no_file_that_is_computed_sooner(
    tiny_model: Path, runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = {"slots_directory": tmp_path / "shared"}
    first = FleetHarness(runtime, tiny_model, supervisor=shared)
    async with first.up():
        await first.converse()
        (entry,) = await saved_entries(first)
        first.traffic.set_prefill_rates({entry.file.cache_key: 5e5})

    monkeypatch.setattr(SlotFiles, "note_read", lambda *_: None)
    second = FleetHarness(runtime, tiny_model, supervisor=shared)
    second.traffic.note_read_time(1e-6)  # slow, but not by the speed that is assumed at first
    async with second.up():
        assert second.traffic.prefill_rates == {entry.file.cache_key: 5e5}
    assert not second.emitted("slots.restored")

    third = FleetHarness(runtime, tiny_model, supervisor=shared)
    async with third.up():
        pass
    assert third.emitted("slots.restored")


async def saved_entries(harness: FleetHarness) -> Collection[CataloguedFile]:
    await harness.save()
    return harness.fleet.slot_files.catalogue.files()


async def test_a_start_waits_once_for_a_shared_directory_that_hangs(
    tiny_model: Path, runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = {"slots_directory": tmp_path / "shared"}
    harness = FleetHarness(runtime, tiny_model, supervisor=shared)
    async with harness.up():
        for begin in ("hello ", "good evening "):
            await harness.converse(begin)
    async with harness.up():
        pass
    assert harness.emitted("slots.restored")  # so its engine is known to use them
    harness.events.clear()
    may_end, check_out = threading.Event(), SlotStore.check_out

    def hang(*given: Any) -> Path:
        may_end.wait()
        return check_out(*given)

    monkeypatch.setattr(SlotStore, "check_out", hang)
    monkeypatch.setattr(SlotFiles, "read_limit_s", lambda *_: 0.05)
    async with harness.up():
        assert len(harness.emitted("slots.restore_failed")) == 1
        may_end.set()
