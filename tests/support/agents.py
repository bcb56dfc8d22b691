"""Sessions of agents on the whole proxy in virtual time, before engines that only wait.

An engine answers as llama-server does: a request may name its slot, else it gets the one used
least recently; tokens of a prompt in a slot, or in the host cache, are not computed again;
`/slots` lists the tasks; slots are saved and restored between two passes. A pass has up to 256
tokens: one of each answer, then those of prompts in the order of slots. Texts are messages with a
number of tokens.

Source: llama.cpp, tools/server/server-context.cpp, as far as `proxy.cache.host_cache` describes it.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import aiohttp
from support.proxy_harness import ProxyHarness
from support.upstream import Call
from support.virtual_time import run_in_virtual_time

from proxy.cache.fingerprint import ConversationFingerprint, SlotFile
from proxy.cache.save_policy import Transfer
from proxy.router.router import Router
from scripts.bench.agent_sessions import AGENTS, Outcome, Sessions
from scripts.bench.deployment import KEYS

_PASS_TOKENS: Final = 256
# A pass over another sequence takes this much longer.
_PASS_SHARE: Final = 0.1
_TOKEN_BYTES: Final = 50_000
# The time of a transfer.
_TRANSFER_S: Final = 0.01
_BYTES_PER_S: Final = 1e9
# The time of an empty task, which copies the idle slots.
_EMPTY_S: Final = 0.05
_NEVER_S: Final = 1e5
_CACHE_KEY: Final = "key"
_ANSWER_TOKENS: Final = 40
_WORD_TOKENS: Final = 1.3
_TOOLS_TOKENS: Final = 150
# The least share of a copy that a prompt must keep to take it from the host cache.
_KEPT_MIN: Final = 0.25

# The parts of a prompt or slot: their texts, and their tokens.
_Text = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class AgentsCase:
    """The simulation's parameters; 8 agents and 2 clients of single turns share the engines' slots.

    Attributes:
        proxy: Settings of `[proxy]`.
        host_cache_bytes: Of each engine.
        has_files: Whether slots are saved to files.
    """

    proxy: Mapping[str, object] = field(default_factory=dict)
    seed: int = 1
    agents: int = AGENTS
    turns: tuple[int, int] = (12, 40)
    instances: int = 2
    slots: int = 2
    prefill_tps: float = 500.0
    decode_tps: float = 50.0
    host_cache_bytes: float = 0.0
    has_files: bool = False


def simulate(case: AgentsCase) -> tuple[Outcome, Router]:
    """Return the outcome of the sessions, and the router that assigned their slots."""
    found: list[tuple[Outcome, Router]] = []

    async def main() -> None:
        with tempfile.TemporaryDirectory(prefix="corral-") as directory:
            async with AsyncExitStack() as stack:
                found.append(await _run(case, Path(directory), stack))

    run_in_virtual_time(main())
    return found[0]


async def _run(case: AgentsCase, directory: Path, stack: AsyncExitStack) -> tuple[Outcome, Router]:
    proxy, keys = ProxyHarness(directory, stack), directory / "keys.toml"
    keys.touch(0o600)
    keys.write_text("".join(f'[keys.{key}]\nkey = "{key}"\n' for key in KEYS), "utf-8")
    await proxy.open(
        api_keys_file=keys,
        ahead_share=0.0,
        max_body_bytes=2**20,
        upstream_read_timeout_s=_NEVER_S,
        **{"queue_timeout_s": _NEVER_S, **case.proxy},
    )
    files: dict[str, _Text] = {}
    async with (
        asyncio.TaskGroup() as group,
        aiohttp.ClientSession(proxy.server.url, timeout=aiohttp.ClientTimeout()) as http,
    ):
        engines = [
            _Engine(case, proxy.router, f"chat.{number}", files) for number in range(case.instances)
        ]
        running = [group.create_task(engine.run()) for engine in engines]
        for engine in engines:
            fake = await proxy.fake(engine.serve, engine.name, is_admitted=False)
            fake.says_slots = False
            upstream = replace(
                fake.upstream(slots=case.slots),
                can_name_slots=True,
                cache_key=_CACHE_KEY if case.has_files else "",
                token_bytes=_TOKEN_BYTES,
                host_cache_bytes=case.host_cache_bytes,
            )
            proxy.router.admit(upstream, storage=engine if case.has_files else None)
        outcome = await Sessions(http, case.seed, case.turns, case.agents).run()
        for task in running:
            task.cancel()
    return outcome, proxy.router


@dataclass(slots=True, eq=False)
class _Slot:
    number: int
    text: _Text = ()
    task: int = -1
    is_busy: bool = False
    prompt_left: int = 0
    answer_left: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()

    def end(self) -> None:
        self.is_busy, self.prompt_left, self.answer_left = False, 0, 0
        self.wake()


class _Engine:
    """One engine; also the storage of its slot files, which all engines share."""

    def __init__(
        self, case: AgentsCase, router: Router, name: str, files: dict[str, _Text]
    ) -> None:
        self._case = case
        self._router = router
        self.name = name
        self._files = files
        self._slots = [_Slot(number) for number in range(case.slots)]
        self._copies: list[_Text] = []  # The host cache, oldest first.
        self._tasks = count(1)
        self._pauses: list[tuple[float, asyncio.Event]] = []
        self._wanted = asyncio.Event()

    async def run(self) -> None:
        """Compute passes until the task is cancelled."""
        while True:
            self._wanted.clear()
            for duration_s, done in self._pauses:
                await asyncio.sleep(duration_s)
                done.set()
            self._pauses.clear()
            prompts = [slot for slot in self._slots if slot.prompt_left]
            answers = [slot for slot in self._slots if slot.answer_left]
            if prompts or answers:
                await self._pass(prompts, answers)
            else:
                await self._wanted.wait()

    async def _pass(self, prompts: Sequence[_Slot], answers: Sequence[_Slot]) -> None:
        left, pass_s = _PASS_TOKENS - len(answers), 0.0
        if answers:
            pass_s = (1 + _PASS_SHARE * (len(answers) - 1)) / self._case.decode_tps
        parts = []
        for slot in prompts:
            parts.append((slot, min(left, slot.prompt_left)))
            left -= parts[-1][1]
        pass_s += sum(tokens for _, tokens in parts) / self._case.prefill_tps
        await asyncio.sleep(pass_s)
        for slot, tokens in parts:
            slot.prompt_left -= min(tokens, slot.prompt_left)
            slot.wake()
        for slot in answers:
            slot.answer_left -= 1
            if not slot.answer_left:
                slot.wake()

    async def serve(self, call: Call) -> None:
        """Answer one request."""
        match call.line.split(" ")[:2]:
            case "GET", "/slots":
                await _say(call, [self._state(slot) for slot in self._slots])
            case "POST", "/completion":  # an empty prompt: the slot counts as used
                number = json.loads(call.body).get("id_slot")
                await self._pause(_EMPTY_S)
                slot = self._choose(()) if number is None else self._slots[number]
                self._begin(slot)
                await _say(call, {"content": "", "id_slot": slot.number})
            case "POST", "/v1/chat/completions":
                await self._chat(call, json.loads(call.body))
            case _:
                await _say(call, {}, "404 Not Found")

    def _state(self, slot: _Slot) -> dict[str, object]:
        tokens = _tokens(slot.text)
        return {
            "id": slot.number,
            "id_task": slot.task,
            "n_prompt_tokens": tokens,
            "is_processing": slot.is_busy,
        }

    def _begin(self, slot: _Slot) -> None:
        """Begin a task; then the idle slots are copied to the host cache."""
        slot.task = next(self._tasks)
        for other in self._slots:
            if other is not slot and not other.is_busy:
                self._copy(other.text)

    def _copy(self, text: _Text) -> None:
        limit_tokens = self._case.host_cache_bytes / _TOKEN_BYTES
        if not text or text in self._copies or _tokens(text) > limit_tokens:
            return
        self._copies = [copy for copy in self._copies if text[: len(copy)] != copy]
        self._copies.append(text)
        while sum(map(_tokens, self._copies)) > limit_tokens:
            self._copies.pop(0)

    def _choose(self, prompt: _Text) -> _Slot:
        """Return the idle slot used least recently, with the copy that has most of a prompt."""
        idle = [slot for slot in reversed(self._slots) if not slot.is_busy]
        slot = min(idle, key=attrgetter("task"))
        self._copy(slot.text)
        shared = _common(slot.text, prompt)
        kept_share = shared / _tokens(slot.text) if slot.text else -1.0
        best: _Text | None = None
        for copy in self._copies:
            tokens = _common(copy, prompt)
            share = tokens / _tokens(copy)
            if share >= _KEPT_MIN and share > kept_share and tokens > shared:
                best, kept_share, shared = copy, share, tokens
        if best is not None:
            self._copies.remove(best)
            slot.text = best
        return slot

    async def _chat(self, call: Call, body: Mapping[str, Any]) -> None:
        prompt = _read(body)
        number = body.get("id_slot")
        slot = self._choose(prompt) if number is None else self._slots[number]
        while slot.is_busy:
            await slot.changed.wait()
        slot.is_busy = True
        try:
            self._begin(slot)
            await self._answer(call, slot, prompt, body)
        finally:
            slot.end()

    async def _answer(
        self, call: Call, slot: _Slot, prompt: _Text, body: Mapping[str, Any]
    ) -> None:
        clock, total = asyncio.get_running_loop().time, _tokens(prompt)
        began_s, cached = clock(), min(_common(slot.text, prompt), total - 1)
        slot.text, slot.prompt_left = prompt, total - cached
        self._wanted.set()
        await call.begin_stream()
        while slot.prompt_left:
            done = total - slot.prompt_left
            progress = {"total": total, "cache": cached, "processed": done, "time_ms": 1}
            await _stream(call, {"content": None}, prompt_progress=progress)
            await slot.changed.wait()
        first_s, slot.answer_left = clock(), _ANSWER_TOKENS - 1
        self._wanted.set()
        await _stream(call, {"content": "a"})
        while slot.answer_left:
            await slot.changed.wait()
        delta: dict[str, Any] = {"content": "a"}
        if body.get("tools"):  # it calls the tool that the latest message names
            tool = body["messages"][-1]["content"].split(" ")[0]
            function = {"name": tool, "arguments": "{}"}
            identity = {"index": 0, "id": f"call_{self.name}_{slot.task}", "type": "function"}
            delta = {"tool_calls": [{**identity, "function": function}]}
        slot.text = (*prompt, _part({"role": "assistant", **delta}))
        timings = {
            "cache_n": cached,
            "prompt_n": total - cached,
            "prompt_ms": 1000 * (first_s - began_s),
            "predicted_n": _ANSWER_TOKENS,
            "predicted_ms": 1000 * (clock() - first_s),
        }
        usage = {
            "prompt_tokens": total,
            "completion_tokens": _ANSWER_TOKENS,
            "total_tokens": total + _ANSWER_TOKENS,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        slot.end()
        await _stream(call, delta)
        reason = "tool_calls" if "tool_calls" in delta else "stop"
        await _stream(call, {}, reason, usage=usage, timings=timings)
        await call.chunk(b"data: [DONE]\n\n")
        await call.end()

    def may_save(self, _instance: str, _size_bytes: float, /) -> bool:
        return True

    async def save(
        self, _instance: str, id_slot: int, tokens: int, fingerprint: ConversationFingerprint, /
    ) -> Transfer | None:
        text = self._slots[id_slot].text
        if _tokens(text) != tokens:
            return None
        transfer = await self._transfer(tokens)
        name = f"{self.name}-{next(self._tasks)}"
        self._files[name] = text
        size_bytes = transfer.size_bytes
        self._router.add_slot_file(SlotFile(name, _CACHE_KEY, tokens, size_bytes, fingerprint))
        return transfer

    async def restore(self, _instance: str, id_slot: int, name: str, /) -> Transfer | None:
        self._slots[id_slot].text = text = self._files[name]
        return await self._transfer(_tokens(text))

    async def look(self, _instance: str, /) -> None:
        return

    async def _transfer(self, tokens: int) -> Transfer:
        size_bytes = tokens * _TOKEN_BYTES
        duration_s = _TRANSFER_S + size_bytes / _BYTES_PER_S
        await self._pause(duration_s)
        return Transfer(tokens, size_bytes, duration_s)

    async def _pause(self, duration_s: float) -> None:
        """Wait for the end of a pass, and for a task that takes so long."""
        done = asyncio.Event()
        self._pauses.append((duration_s, done))
        self._wanted.set()
        await done.wait()


async def _say(call: Call, page: object, status: str = "200 OK") -> None:
    body = json.dumps(page).encode()
    length = f"Content-Length: {len(body)}"
    await call.head("Content-Type: application/json", length, status=status)
    await call.send(body)


async def _stream(
    call: Call, delta: Mapping[str, Any], reason: str | None = None, **members: object
) -> None:
    choice = {"index": 0, "finish_reason": reason, "delta": delta}
    about = {"id": "a", "object": "chat.completion.chunk", "created": 1, "model": "chat"}
    event = json.dumps({**about, "choices": [choice], **members})
    await call.chunk(f"data: {event}\n\n".encode())


def _read(body: Mapping[str, Any]) -> _Text:
    tools = (("tools", _TOOLS_TOKENS),) if body.get("tools") else ()
    return (*tools, *map(_part, body["messages"]))


def _part(message: Mapping[str, Any]) -> tuple[str, int]:
    if message["role"] == "assistant":
        return repr([call["id"] for call in message.get("tool_calls") or ()]), _ANSWER_TOKENS
    text: str = message["content"]
    return text, round(_WORD_TOKENS * len(text.split()))


def _tokens(text: _Text) -> int:
    return sum(tokens for _, tokens in text)


def _common(text: _Text, prompt: _Text) -> int:
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(text, prompt, strict=False))
    return sum(tokens for (_, tokens), _ in shared)
