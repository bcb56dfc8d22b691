"""A slot's content is saved before another conversation takes it, and restored from its file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.requests import ask
from support.upstream import Call, Fake

from proxy.cache.fingerprint import ConversationFingerprint, SlotFile
from proxy.cache.prompt import read_prompt
from proxy.cache.save_policy import Transfer
from proxy.errors import UpstreamCrashed, UpstreamFailed
from proxy.request.request import ProxyRequest
from proxy.router.lease import Completion, Lease
from proxy.router.router import Router
from proxy.upstream.endpoint_kinds import EndpointKind
from proxy.upstream.upstream import Timings

A, B = "a long story of a river and a stone " * 20, "another tale of a king and a queen " * 20
FIRST, OTHER, NEXT = ask(A), ask(B), ask(A, "verse", "and then?")
HELD = 303
HOST_CACHE_BYTES = HELD * 10_000 * 1.5
TRANSFER = Transfer(HELD, 3_000_000, 0.01)


class Engine(Fake):
    """Has one used slot, and counts the empty requests in it."""

    def __init__(self, socket: Path) -> None:
        super().__init__("chat.0", socket, self._play)
        self.says_slots = False
        self.empties = 0

    async def _play(self, call: Call) -> None:
        page: object = [{"id": 0, "id_task": 3, "n_prompt_tokens": HELD, "is_processing": False}]
        if call.line.startswith("POST /completion"):
            self.empties += 1
            page = {"id_slot": 0, "content": ""}
        said = json.dumps(page).encode()
        await call.head("Content-Type: application/json", f"Content-Length: {len(said)}")
        await call.send(said)


class Storage:
    """Keeps files in memory, and tells the router of them at once."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.calls: list[tuple[str, int, str]] = []
        self.verified: list[tuple[str, int, int]] = []
        self.router = Router()
        self.is_lost = False
        self.is_full = False
        self.is_broken = False
        self.deleted: list[str] = []  # by another daemon, which the next look finds out
        self.begun = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    def note_verified(self, name: str, tokens: int, timings: Timings) -> None:
        self.verified.append((name, tokens, timings.cached_tokens))

    def may_save(self, _instance: str, _size_bytes: float, /) -> bool:
        return not self.is_full

    async def save(
        self, _instance: str, slot: int, tokens: int, what: ConversationFingerprint, /
    ) -> Transfer | None:
        name = f"file {len(self.calls)}"
        self.calls.append(("save", slot, name))
        self.begun.set()
        await self.gate.wait()
        if self.is_broken:
            return None
        self.router.add_slot_file(SlotFile(name, "key", tokens, 3_000_000, what))
        return TRANSFER

    async def restore(self, _instance: str, slot: int, name: str, /) -> Transfer | None:
        self.calls.append(("restore", slot, name))
        await self.gate.wait()
        if self.is_lost:
            self.router.remove_slot_files([name])
            return None
        return TRANSFER

    async def look(self, _instance: str, /) -> None:
        self.router.remove_slot_files(self.deleted)


@pytest.fixture
async def storage(request: pytest.FixtureRequest) -> AsyncIterator[Storage]:
    with TemporaryDirectory(prefix="corral-") as directory:
        engine = Engine(Path(directory) / "engine.sock")
        await engine.start()
        found = Storage(engine)
        found.router = Router()
        found.router.signals.restore_verified.connect(found.note_verified)
        upstream = replace(
            engine.upstream(slots=1),
            can_name_slots=True,
            cache_key="key",
            token_bytes=10_000,
            host_cache_bytes=HOST_CACHE_BYTES,
            reports_exit=True,
        )
        found.router.admit(replace(upstream, **getattr(request, "param", {})), (), found)
        yield found
        await engine.stop()


async def answered(
    storage: Storage,
    request: ProxyRequest,
    found: int = 0,
    computed: int = 300,
    decode_ms: float = 40.0,
) -> Lease:
    """Have a request answered by an engine that computes 500 tokens a second."""
    async with storage.router.lease(request) as lease:
        timings = Timings(found, computed, 2.0 * computed, 4, decode_ms)
        storage.router.finish(lease, Completion(timings, {"content": "verse"}))
    return lease


def store(storage: Storage, request: ProxyRequest) -> None:
    """Have a file of a request's whole prompt."""
    assert request.prompt
    held = ConversationFingerprint((), request.prompt.blocks)
    storage.router.add_slot_file(SlotFile("file", "key", HELD, 3_000_000, held))


async def crashed(storage: Storage, request: ProxyRequest) -> None:
    """Have the engine crash while it computes a request."""
    async with storage.router.lease(request):
        storage.router.note_end("chat.0", "crashed")
        raise UpstreamFailed("it is gone")


async def test_a_conversation_is_saved_and_comes_back(storage: Storage) -> None:
    await answered(storage, FIRST)
    assert storage.calls == []
    await answered(storage, OTHER)
    assert storage.calls == [("save", 0, "file 0")]
    lease = await answered(storage, NEXT)
    assert storage.calls[1:] == [("save", 0, "file 1"), ("restore", 0, "file 0")]
    assert lease.id_slot == 0
    assert lease.restored
    assert lease.restored.file.name == "file 0"
    assert 150 < lease.expected_cached <= HELD
    assert storage.verified == [("chat.0", HELD, 0)]


async def test_a_conversation_in_its_slot_needs_no_file(storage: Storage) -> None:
    await answered(storage, FIRST)
    lease = await answered(storage, NEXT)
    assert storage.calls == []
    assert lease.has_own_slot


async def test_what_no_file_holds_is_left_to_the_host_cache(storage: Storage) -> None:
    storage.is_full = True
    await answered(storage, FIRST)
    lease = await answered(storage, OTHER)
    assert lease.id_slot is None  # or the engine would not copy the content of its slot
    lease = await answered(storage, NEXT)
    assert lease.id_slot is None
    assert lease.expected_cached > 150
    assert storage.calls == []


@pytest.mark.parametrize("storage", [{"slots": 2}], indirect=True)
@pytest.mark.parametrize(("decode_ms", "saves"), [(40.0, 1), (4000.0, 0)])
async def test_a_request_does_not_wait_for_a_save_if_it_then_misses_a_long_pass(
    storage: Storage, decode_ms: float, saves: int
) -> None:
    await answered(storage, FIRST, decode_ms=decode_ms)
    async with storage.router.lease(ask("a stream beside it")) as stream:
        stream.progress.count_token()
        await answered(storage, OTHER)
    assert len(storage.calls) == saves


async def test_a_short_conversation_is_replaced_by_a_request_that_names_its_slot(
    storage: Storage,
) -> None:
    storage.is_full = True
    await answered(storage, ask("a long story"), computed=100)
    lease = await answered(storage, OTHER)
    assert lease.id_slot == 0  # without a name, the engine could choose another


@pytest.mark.parametrize(
    ("storage", "saves"),
    [
        ({"token_bytes": 300_000, "host_cache_bytes": 1e6}, 1),
        ({"token_bytes": 300_000, "host_cache_bytes": 1e9}, 0),
    ],
    indirect=["storage"],
)
async def test_what_leaves_its_slot_is_saved_where_the_host_cache_cannot_keep_it(
    storage: Storage, saves: int
) -> None:
    await answered(storage, FIRST)
    for _ in range(20):  # in its slot
        await answered(storage, NEXT, found=HELD, computed=1)
    await answered(storage, OTHER)
    assert len(storage.calls) == saves


@pytest.mark.parametrize(
    "storage", [{"token_bytes": 300_000, "host_cache_bytes": 1e9}], indirect=True
)
async def test_what_a_file_overwrites_is_saved_even_if_the_host_cache_loses_nothing(
    storage: Storage,
) -> None:
    await answered(storage, FIRST)
    for _ in range(20):  # in its slot, of which the host cache has no copy
        await answered(storage, NEXT, found=HELD, computed=1)
    store(storage, OTHER)
    assert (await answered(storage, OTHER)).restored
    assert [what for what, *_ in storage.calls] == ["save", "restore"]
    assert not storage.engine.empties


async def test_what_is_not_saved_is_copied_before_a_file_overwrites_it(storage: Storage) -> None:
    storage.is_full = True
    await answered(storage, FIRST)
    store(storage, OTHER)
    assert (await answered(storage, OTHER)).restored
    assert [what for what, *_ in storage.calls] == ["restore"]
    assert storage.engine.empties == 1
    lease = await answered(storage, NEXT)
    assert lease.id_slot is None  # with a name, the engine would look in that slot only
    assert lease.expected_cached > 100


@pytest.mark.parametrize("storage", [{"host_cache_bytes": 0}], indirect=True)
async def test_nothing_is_copied_without_a_host_cache(storage: Storage) -> None:
    storage.is_full = True
    await answered(storage, FIRST)
    store(storage, OTHER)
    assert (await answered(storage, OTHER)).restored
    assert not storage.engine.empties


async def test_a_request_whose_file_is_gone_looks_in_the_host_cache(storage: Storage) -> None:
    storage.is_full = True
    await answered(storage, FIRST)
    await answered(storage, OTHER)
    again = ask(B, "verse", "and then?")
    await answered(storage, again, found=HELD, computed=1)  # the number of its slot is known now
    store(storage, NEXT)
    storage.deleted = ["file"]
    lease = await answered(storage, NEXT)
    assert lease.expected_cached > 0
    assert lease.id_slot is None  # with a name, the engine would look in that slot only


@pytest.mark.parametrize("storage", [{"slots": 2}], indirect=True)
async def test_a_request_without_a_named_slot_does_not_overtake_those_that_name_theirs(
    storage: Storage,
) -> None:
    storage.is_full = True
    await answered(storage, FIRST)
    await answered(storage, OTHER)
    async with asyncio.TaskGroup() as group, storage.router.lease(NEXT) as first:
        assert first.id_slot is not None
        later = group.create_task(answered(storage, ask("a third one", kind=EndpointKind.INFILL)))
        for _ in range(20):  # without I/O it would be answered by then
            await asyncio.sleep(0)
        assert not later.done()
        first.note_header()
        assert (await later).id_slot is None
        storage.router.finish(first)


@pytest.mark.parametrize("storage", [{"slots": 2}], indirect=True)
async def test_a_file_does_not_overtake_requests_that_make_the_engine_copy_its_slot(
    storage: Storage,
) -> None:
    storage.is_full = True
    await answered(storage, FIRST)
    await answered(storage, OTHER)
    store(storage, third := ask("a long tale of a ship and a moon " * 20))
    async with asyncio.TaskGroup() as group, storage.router.lease(NEXT) as first:
        later = group.create_task(answered(storage, third))
        for _ in range(20):  # without I/O it would be restored by then
            await asyncio.sleep(0)
        assert not storage.calls
        first.note_header()
        assert (await later).restored
        storage.router.finish(first)


async def test_an_engine_that_finds_nothing_of_its_files_is_given_no_more(storage: Storage) -> None:
    turns = [FIRST, OTHER] * 8
    for turn in turns:
        await answered(storage, turn)
    begun = len(storage.calls)
    for turn in turns:
        await answered(storage, turn)
    assert [what for what, *_ in storage.calls if what == "restore"]
    assert len(storage.calls) == begun


async def test_a_lost_file_is_computed(storage: Storage) -> None:
    await answered(storage, FIRST)
    await answered(storage, OTHER)
    storage.is_lost = True
    lease = await answered(storage, NEXT)
    assert not lease.restored
    await answered(storage, OTHER)  # its file is there
    assert [name for what, _, name in storage.calls if what == "restore"] == ["file 0", "file 1"]


async def test_a_file_that_an_engine_crashed_over_is_not_restored_again(storage: Storage) -> None:
    await answered(storage, FIRST)
    await answered(storage, OTHER)
    with pytest.raises(UpstreamCrashed):
        await crashed(storage, NEXT)
    assert ("restore", 0, "file 0") in storage.calls
    assert not (await answered(storage, NEXT)).restored


@pytest.mark.parametrize("is_over", [False, True])
async def test_a_turn_waits_for_the_file_of_an_instance_that_drains(
    storage: Storage, *, is_over: bool
) -> None:
    held = (await answered(storage, FIRST)).upstream
    storage.router.admit(replace(held, name="chat.1", api_key="another"), (), storage)
    storage.router.withdraw("chat.0")
    await answered(storage, OTHER)
    if is_over:
        storage.router.note_end("chat.0", "stopped")
    async with asyncio.TaskGroup() as group:
        turn = group.create_task(answered(storage, NEXT))
        for _ in range(20):  # without I/O it waits by then
            await asyncio.sleep(0)
        if not is_over:
            store(storage, FIRST)
    assert (("restore", 0, "file") in storage.calls) is not is_over
    assert bool(turn.result().restored) is not is_over


async def test_an_api_without_slot_numbers_gets_the_filled_slot_too(storage: Storage) -> None:
    await answered(storage, FIRST)
    await answered(storage, OTHER)
    lease = await answered(storage, replace(NEXT, kind=EndpointKind.MESSAGES))
    assert lease.restored
    assert lease.id_slot is None
    assert not storage.verified  # the engine may have taken another slot


async def test_a_client_that_leaves_during_a_save_loses_nothing(storage: Storage) -> None:
    await answered(storage, FIRST)
    storage.gate.clear()
    async with asyncio.TaskGroup() as group:
        leaving = group.create_task(answered(storage, OTHER))
        await storage.begun.wait()
        leaving.cancel()
    storage.gate.set()
    assert (await answered(storage, NEXT)).has_own_slot


@pytest.mark.parametrize(
    ("is_broken", "text", "calls"),
    [
        pytest.param(False, 4 * A, ["save", "restore"], id="saved there, restored here"),
        pytest.param(True, 4 * A, ["save"], id="computed, as the save fails"),
        pytest.param(False, A[:200], [], id="computed, as it is short"),
    ],
)
async def test_a_beginning_in_an_idle_slot_of_another_instance_is_saved_for_a_request(
    storage: Storage, *, is_broken: bool, text: str, calls: list[str]
) -> None:
    held = (await answered(storage, ask(text + "and one more"))).upstream
    storage.is_broken = is_broken
    storage.router.admit(replace(held, name="chat.1", api_key="another"), (), storage)
    async with storage.router.lease(ask(text + "or another"), avoid=["chat.0"]) as lease:
        assert lease.upstream.name == "chat.1"
        assert [call for call, *_ in storage.calls] == calls
        assert bool(lease.restored) is ("restore" in calls)
        storage.router.finish(lease)


@pytest.mark.parametrize("storage", [{"resumable_prompts": 2}], indirect=True)
@pytest.mark.parametrize(("is_recurrent", "found"), [(True, 0), (False, 20)])
async def test_a_beginning_of_which_an_engine_finds_little_is_not_restored_again(
    storage: Storage, *, is_recurrent: bool, found: int
) -> None:
    def question(text: str) -> ProxyRequest:
        messages = [{"role": "system", "content": A}, {"role": "user", "content": text}]
        members = {"model": "chat", "messages": messages}
        prompt = read_prompt(EndpointKind.CHAT, "chat", members)
        return replace(ask(text), json=members, prompt=prompt)

    request = question("one")
    prompt = request.prompt
    assert prompt
    blocks = prompt.blocks[: prompt.beginning_blocks]
    beginning, outdated = prompt.shared_hashes[-1] if is_recurrent else 0, list[str]()
    storage.router.signals.file_outdated.connect(outdated.append)
    storage.router.add_slot_file(
        SlotFile(
            "a",
            "key",
            HELD,
            3_000_000,
            ConversationFingerprint((), blocks, beginning=beginning),
            is_recurrent=is_recurrent,
        )
    )
    assert (await answered(storage, request, found=HELD, computed=9)).restored
    await answered(storage, OTHER)
    assert not outdated
    assert (await answered(storage, question("two"), found=found)).restored
    assert outdated == ["a"]
    assert (await answered(storage, question("three"))).restored is None
