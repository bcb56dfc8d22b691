"""Slot files go from an engine to one with another number of slots."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from support import tiny_hybrid
from support.fleet_harness import LONG, FleetHarness
from support.slot_files import content

from supervisor.slot_store.manifest import CacheKey
from supervisor.slot_store.slot_file import InvalidSlotFile, rewrite

HEAD = content([7, 8, 9]).removesuffix(b"state" * 100)
CELLS = struct.pack("<I", 3) + b"data of three cells."


def state(caches: int, *, leading: int, trailing: int) -> bytes:
    zero = struct.pack("<I", 0)
    return HEAD + struct.pack("<I", caches) + zero * leading + CELLS + zero * trailing


@pytest.mark.parametrize("leading", [0, 1, 3])
@pytest.mark.parametrize("after", [1, 2, 4, 16])
def test_the_sequence_comes_first_and_the_rest_is_empty(
    tmp_path: Path, leading: int, after: int
) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    source.write_bytes(state(4, leading=leading, trailing=3 - leading))
    rewrite(source, target, before=4, after=after)
    assert target.read_bytes() == state(after, leading=0, trailing=after - 1)
    assert target.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (state(8, leading=0, trailing=7), "not of 4 slots"),
        (HEAD, "too short"),
        (HEAD + struct.pack("<I", 4), "too short"),
        (HEAD + struct.pack("<5I", 4, 0, 0, 0, 0), "no sequence"),
        (state(4, leading=1, trailing=1) + struct.pack("<I", 5), "more than one"),
        (HEAD + struct.pack("<3I", 4, 3, 0), "more than one"),
    ],
)
def test_another_state_is_refused(tmp_path: Path, text: bytes, problem: str) -> None:
    source = tmp_path / "a"
    source.write_bytes(text)
    with pytest.raises(InvalidSlotFile, match=problem):
        rewrite(source, tmp_path / "b", before=4, after=8)


RECURRENT = struct.pack("<IiIIIiQ", 1, 2, 0, 0, 12, 0, 16) + b"state of 16 byte"


@pytest.mark.parametrize("after", [1, 16])
def test_a_recurrent_state_stays_at_the_end(tmp_path: Path, after: int) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    source.write_bytes(state(4, leading=1, trailing=2) + RECURRENT)
    rewrite(source, target, before=4, after=after, state_bytes=16)
    assert target.read_bytes() == state(after, leading=0, trailing=after - 1) + RECURRENT


@pytest.mark.parametrize("tail", [b"", RECURRENT[:-13], RECURRENT + b"more than its layers" * 20])
def test_a_file_without_its_recurrent_state_is_refused(tmp_path: Path, tail: bytes) -> None:
    (tmp_path / "a").write_bytes(state(4, leading=1, trailing=2) + tail)
    with pytest.raises(InvalidSlotFile, match="no recurrent state"):
        rewrite(tmp_path / "a", tmp_path / "b", before=4, after=8, state_bytes=16)


OWN = ("--parallel 4", "--no-kv-unified", "--cache-type-k f16")


@pytest.mark.parametrize(
    ("options", "fits"),
    [
        (("--parallel 8", *OWN[1:]), True),
        (("--parallel 8", "--no-kv-unified", "--cache-type-k q8_0"), False),
        (("--parallel 8", "--kv-unified", OWN[2]), False),
        (("--parallel 8", *OWN[1:], "--swa-full"), False),
        (OWN[1:], False),
    ],
)
def test_which_caches_fit(options: tuple[str, ...], fits: bool) -> None:  # noqa: FBT001
    one, other = CacheKey("model", "b10434", OWN), CacheKey("model", "b10434", options)
    assert one.fits(other) is other.fits(one) is fits
    assert one.fits(one)
    assert not one.fits(CacheKey("model", "b11434", OWN))


def test_a_recurrent_state_of_unknown_size_fits_the_same_slots_only() -> None:
    one, other = (CacheKey("model", "b10434", (f"--parallel {n}", *OWN[1:]), None) for n in (2, 4))
    assert one.fits(one)
    assert not one.fits(other)


def test_a_recurrent_state_beside_a_window_fits_the_same_slots_only() -> None:
    few, many = (
        CacheKey("model", "b10434", (f"--parallel {n}", *OWN[1:]), 16, window=64) for n in (2, 4)
    )
    assert few.fits(few)
    assert not few.fits(many)


@pytest.mark.parametrize("flags", [{}, {"swa-full": True}], ids=["usual", "swa-full"])
@pytest.mark.parametrize(("before", "id_slot", "after"), [(2, 1, 8), (4, 3, 2), (4, 0, 1)])
async def test_a_conversation_continues_from_its_cache_with_other_slots(
    tiny_model: Path, runtime: Path, before: int, id_slot: int, after: int, flags: dict[str, bool]
) -> None:
    sizes = {"parallel": before, "ctx-size": 2048 * before}
    first = FleetHarness(runtime, tiny_model, {**flags, **sizes})
    question = {"role": "user", "content": LONG}
    async with first.up():
        said, _ = await first.ask([question], id_slot)
        turn = [question, {"role": "assistant", "content": said}, {"role": "user", "content": "go"}]
        await first.save()
        expected, _ = await first.ask(turn, id_slot)

    sizes = {"parallel": after, "ctx-size": 2048 * after}
    second = FleetHarness(runtime, tiny_model, {**flags, **sizes})
    async with second.up():
        found, timings = await second.ask(turn)
    assert timings["cache_n"] > 600
    assert found == expected
    assert second.emitted("slots.quarantined") == []


@pytest.mark.parametrize("after", [1, 8])
async def test_a_recurrent_state_continues_with_other_slots(
    runtime: Path, tmp_path: Path, after: int
) -> None:
    """The weights are random: with another state the answer would be another."""
    model = tiny_hybrid.make(tmp_path / "hybrid.gguf")
    prompt = [1, *(270 + number % 100 for number in range(400))]
    first = FleetHarness(runtime, model, {"parallel": 4, "ctx-size": 8192})
    async with first.up():
        prompt += (await first.complete(prompt, id_slot=1))["tokens"]
    second = FleetHarness(runtime, model, {"parallel": after, "ctx-size": 2048 * after})
    async with second.up():
        (held,) = (
            restored_slot
            for restored_slot in second.replica.slots.restored_slots(1)
            if restored_slot.tokens
        )
        restored = await second.complete([*prompt, 300], id_slot=held.id_slot)
        computed = await second.complete([*prompt, 300], cache_prompt=False)
    assert restored["timings"]["cache_n"] == held.tokens
    assert restored["tokens"] == computed["tokens"]
    assert second.emitted("slots.quarantined") == []
