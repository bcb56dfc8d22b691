"""When idle slots are saved, and which."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import pytest
from support.requests import ask, upstream
from support.virtual_time import run_in_virtual_time

from proxy.cache.fingerprint import ConversationFingerprint
from proxy.cache.index import PrefixIndex
from proxy.cache.save_policy import IDLE_S, Transfer
from proxy.cache.slot_map import Slot
from proxy.router.lease import Lease
from proxy.router.registry import Instances, InstanceTasks
from proxy.router.slot_saver import SlotSaver
from proxy.settings import ProxySettings
from proxy.upstream.engine_state import SlotState
from proxy.upstream.upstream import Upstream

SAVE_S = 0.02


class Disk:
    """Saves in 20 ms while it works; remembers when it began with which slot."""

    def __init__(self) -> None:
        self.began: list[tuple[float, int]] = []
        self.works = True
        self.save_s = SAVE_S

    def may_save(self, _instance: str, _size_bytes: float, /) -> bool:
        return True

    async def save(
        self, _instance: str, id_slot: int, tokens: int, _of: ConversationFingerprint, /
    ) -> Transfer | None:
        self.began.append((asyncio.get_running_loop().time(), id_slot))
        await asyncio.sleep(self.save_s)
        return Transfer(tokens, 12_000 * tokens, self.save_s) if self.works else None

    async def restore(self, _instance: str, _slot: int, _name: str, /) -> Transfer | None:
        return None

    async def look(self, _instance: str, /) -> None:
        return

    @property
    def slots(self) -> list[int]:
        return [id_slot for _, id_slot in self.began]


class Harness:
    """An engine of four slots, which takes the one used longest ago, and its writer."""

    def __init__(self) -> None:
        clock = asyncio.get_running_loop().time
        self.clock, self.disk = clock, Disk()
        self.index = PrefixIndex(1000, clock)
        self.upstream = replace(upstream("a", 4), cache_key="key", token_bytes=12_000)
        self.index.register(self.upstream)
        instances = Instances(clock, route_by_speed=True)
        self.instance = instances.admit(self.upstream, self.index.bit("a"))
        self.slot_map = self.index.slot_maps["a"]
        self.tasks = InstanceTasks()
        self.writer = SlotSaver(
            self.index, ProxySettings(), self.disk, clock, self.list_slots, self.tasks
        )
        self.states = [SlotState(number, -1, 0, is_busy=False) for number in range(4)]
        self.listed_at_s: list[float] = []

    async def list_slots(self, _: Upstream) -> Sequence[SlotState]:
        self.listed_at_s.append(self.clock())
        return self.states

    def begin(self, text: str) -> Lease:
        lease = self.reserve(text)
        slot, prompt = lease.slot, lease.request.prompt
        assert slot
        assert prompt
        self.slot_map.mark_sent(slot, is_named=True)
        self._set(slot, prompt.tokens, is_busy=True)
        return lease

    def reserve(self, text: str) -> Lease:
        lease = Lease(ask(text), self.instance, self.clock)
        prompt = lease.request.prompt
        assert prompt
        hint = self.index.look_up(prompt, None)
        lease.conversation = self.index.assign(self.upstream, prompt, None, hint)
        self.instance.hold((lease,))
        lease.slot = self.slot_map.reserve(lease, lease.conversation, self.clock())
        return lease

    def end(self, lease: Lease) -> None:
        slot, prompt = lease.slot, lease.request.prompt
        assert slot
        assert prompt
        self.index.record("a", prompt, 0, None, {"content": "verse"})
        self.instance.drop(lease)
        assert lease.conversation
        self.slot_map.release(lease, self.clock())
        self.slot_map.set_conversation(slot, lease.conversation, prompt.tokens, prompt.blocks)
        self._set(slot, prompt.tokens, is_busy=False)
        self.writer.note_end(self.instance)

    def answer(self, text: str) -> None:
        self.end(self.begin(text))

    def _set(self, slot: Slot, tokens: int, *, is_busy: bool) -> None:
        self.states[slot.id_slot] = SlotState(
            slot.id_slot, slot.started_tick, tokens, is_busy=is_busy
        )


def story(name: str, words: int = 400) -> str:
    return f"{name} " * words


def run(test: Callable[[Harness], Awaitable[None]]) -> None:
    async def main() -> None:
        harness = Harness()
        async with asyncio.TaskGroup() as group:
            writing = group.create_task(harness.tasks.run())
            await asyncio.sleep(0)
            await test(harness)
            writing.cancel()

    run_in_virtual_time(main())


def test_an_idle_engine_saves_one_slot_after_the_other_the_longest_first() -> None:
    async def test(harness: Harness) -> None:
        for words in (300, 900, 600, 10):
            harness.answer(story("river", words))
        await asyncio.sleep(1)
        assert harness.disk.slots == [2, 1, 3]
        times_s = [at_s for at_s, _ in harness.disk.began]
        assert [round(at_s - times_s[0], 3) for at_s in times_s] == [0, SAVE_S, 2 * SAVE_S]
        assert 0.2 < times_s[0] < 0.5
        assert len(harness.listed_at_s) == 1

    run(test)


def test_a_long_save_waits_for_a_longer_pause() -> None:
    async def test(harness: Harness) -> None:
        harness.disk.save_s = 6.0
        harness.instance.rates.prefill_tps = 10.0
        harness.answer(story("river"))  # nothing is known of the disk yet
        await asyncio.sleep(60)
        harness.answer(story("lake"))
        asked_at_s = harness.clock()
        await asyncio.sleep(5)
        assert len(harness.disk.began) == 1
        await asyncio.sleep(600)
        assert len(harness.disk.began) == 2
        began_at_s, _ = harness.disk.began[1]
        assert began_at_s - asked_at_s > 5

    run(test)


def test_what_is_saved_is_not_saved_again_until_it_has_changed() -> None:
    async def test(harness: Harness) -> None:
        harness.answer(story("river"))
        await asyncio.sleep(60)
        harness.answer("short")
        await asyncio.sleep(60)
        assert harness.disk.slots == [3]
        harness.answer(story("river", 800))
        await asyncio.sleep(60)
        assert harness.disk.slots == [3, 1]

    run(test)


def test_a_request_ends_the_saving() -> None:
    async def test(harness: Harness) -> None:
        for name in ("river", "stone", "field"):
            harness.answer(story(name))
        await asyncio.sleep(0.26)
        lease = harness.begin(story("meadow"))
        lease.progress.count_token()
        await asyncio.sleep(0.2)
        assert len(harness.disk.slots) == 1
        harness.end(lease)
        await asyncio.sleep(1)
        assert sorted(harness.disk.slots) == [0, 1, 2, 3]

    run(test)


def test_a_request_waits_for_the_save_of_the_slot_that_it_takes() -> None:
    async def test(harness: Harness) -> None:
        for name in ("river", "lake", "sea", "pond"):
            harness.answer(story(name, 900 if name == "river" else 400))
        await asyncio.sleep(IDLE_S + SAVE_S / 2)
        [(began_at_s, number)] = harness.disk.began
        lease = harness.reserve(story("brook"))
        assert lease.slot
        assert lease.slot.id_slot == number
        await harness.writer.fill(lease, lease.slot)
        assert harness.clock() - began_at_s == pytest.approx(SAVE_S)
        assert harness.disk.slots.count(number) == 1

    run(test)


def test_who_needs_a_slot_that_is_being_saved_waits_for_that_save() -> None:
    async def test(harness: Harness) -> None:
        harness.answer(story("river"))
        await asyncio.sleep(IDLE_S + SAVE_S / 2)
        [(_, number)] = harness.disk.began
        slot = next(slot for slot in harness.slot_map.idle if slot.id_slot == number)
        await harness.writer.save_for_others(harness.instance, slot)
        assert slot.content.is_saved
        assert harness.disk.slots == [number]

    run(test)


def test_beside_streams_the_slot_that_is_taken_next_is_saved_once_in_150_tokens() -> None:
    async def test(harness: Harness) -> None:
        streams = [harness.begin("one"), harness.begin("two")]
        for stream in streams:
            stream.is_placed = True
            stream.progress.count_token()
        for name in ("river", "stone"):
            harness.answer(story(name))
        await asyncio.sleep(20)
        assert harness.disk.slots == [1, 0]
        first_s, second_s = (at_s for at_s, _ in harness.disk.began)
        assert second_s - first_s > 150 / harness.instance.rates.decode_tps - 1
        pauses_s = zip(harness.listed_at_s, harness.listed_at_s[1:], strict=False)
        assert all(later - before >= 2 for before, later in pauses_s)

    run(test)


def test_beside_a_prompt_slots_are_saved_without_such_a_pause() -> None:
    async def test(harness: Harness) -> None:
        harness.begin("one").is_placed = True
        for name in ("river", "stone"):
            harness.answer(story(name))
        await asyncio.sleep(6)
        assert harness.disk.slots == [2, 1]

    run(test)


def test_nothing_is_saved_beside_streams_while_most_slots_are_free() -> None:
    async def test(harness: Harness) -> None:
        stream = harness.begin("one")
        stream.progress.count_token()
        harness.answer(story("river"))
        await asyncio.sleep(60)
        assert not harness.disk.slots
        harness.end(stream)
        await asyncio.sleep(1)
        assert harness.disk.slots == [2]

    run(test)


def test_a_save_that_fails_is_tried_again_after_the_next_request() -> None:
    async def test(harness: Harness) -> None:
        harness.disk.works = False
        harness.answer(story("river"))
        await asyncio.sleep(60)
        assert harness.disk.slots == [3]
        harness.disk.works = True
        harness.answer("short")
        await asyncio.sleep(60)
        harness.answer("short")
        await asyncio.sleep(60)
        assert harness.disk.slots == [3, 3]

    run(test)


def test_a_slot_that_others_have_used_is_not_saved() -> None:
    async def test(harness: Harness) -> None:
        harness.answer(story("river"))
        harness.states[3] = SlotState(3, 99, 7, is_busy=False)
        await asyncio.sleep(60)
        assert not harness.disk.slots

    run(test)


def test_an_instance_that_is_withdrawn_is_left_alone() -> None:
    async def test(harness: Harness) -> None:
        harness.answer(story("river"))
        harness.instance.in_service = False
        await asyncio.sleep(60)
        assert not harness.disk.slots

    run(test)
