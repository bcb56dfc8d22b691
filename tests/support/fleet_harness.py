"""A fleet of one model on the real engine, asked without a proxy, with a shelf to look at."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from support.corral_cli import PATIENCE_S
from support.instance_harness import QUICK, RecordingTraffic

from supervisor.engine.client import EngineClient
from supervisor.engine.states import State
from supervisor.events import EventStream
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.model import Replica
from supervisor.fleet.planner import LaunchPlanner
from supervisor.settings.schema import ModelSettings, Settings, SupervisorSettings
from supervisor.slot_store.manifest import Manifest
from supervisor.system.paths import Directories

UP = frozenset({State.READY})
DOWN = frozenset({State.STOPPED})
LONG = "the an in of on er th he user system " * 40

Messages = list[dict[str, str]]


class FleetHarness:
    """A model named `chat`, and everything around it.

    Args:
        home: Kept short: sockets lie in it.
        model: The GGUF.
        flags: Of the model, over those of a small one.
        supervisor: Settings of `[supervisor]`.
        prompts: Files to be read ahead.
        learns: Whether learned prompts are read too.
    """

    def __init__(
        self,
        home: Path,
        model: Path,
        flags: Mapping[str, Any] | None = None,
        supervisor: Mapping[str, Any] | None = None,
        prompts: tuple[Path, ...] = (),
        *,
        learns: bool = False,
    ) -> None:
        small = {"threads": 1, "threads-batch": 1, "parallel": 2, "ctx-size": 4096}
        entry = ModelSettings(
            path=model,
            flags={**small, **(flags or {})},
            warm_prompts=prompts,
            learn_prompts=learns,
        )
        settings = Settings(
            models={"chat": entry},
            supervisor=SupervisorSettings(**{**QUICK.model_dump(), **(supervisor or {})}),
        )
        self.events: list[tuple[str, Mapping[str, Any]]] = []
        stream = EventStream(lambda event: self.events.append((event.name, event.fields)))
        self.traffic = RecordingTraffic()
        self.planner = LaunchPlanner(settings, Directories(*[home] * 5))
        self.store = self.planner.launches.slot_persistence.store
        self.fleet = Fleet(self.planner, self.traffic, stream.emit)

    @property
    def replica(self) -> Replica:
        return self.fleet.replica("chat.0")

    @property
    def log(self) -> str:
        path = self.replica.instance.snapshot().log_path
        assert path
        return path.read_text("utf-8", "replace")

    def emitted(self, name: str) -> list[Mapping[str, Any]]:
        """Return the fields of the events of a name."""
        return [fields for event, fields in self.events if event == name]

    @asynccontextmanager
    async def up(self) -> AsyncIterator[None]:
        """Serve until the block ends; then stop, drain and all."""
        instance = self.replica.instance
        async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
            serving = group.create_task(self.fleet.serve())
            instance.start()
            await instance.wait(UP)
            yield
            instance.stop()
            await instance.wait(DOWN)
            serving.cancel()

    def client(self) -> EngineClient:
        facts = self.replica.instance.snapshot()
        return EngineClient(facts.endpoint, facts.api_key)

    async def save(self) -> None:
        """Have the idle slots saved now."""
        async with self.client() as client:
            await self.replica.slots.save(client, self.replica.instance.snapshot().run)

    async def ask(
        self, messages: Messages, id_slot: int | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Return the engine's answer and its timings."""
        body: dict[str, Any] = {"messages": messages, "max_tokens": 12, "temperature": 0}
        if id_slot is not None:
            body["id_slot"] = id_slot
        async with self.client() as client:
            answer = json.loads((await client.post("/v1/chat/completions", body)).body)
        return answer["choices"][0]["message"]["content"], answer["timings"]

    async def complete(self, prompt: list[int], **more: object) -> Any:
        """Return the engine's answer to a prompt of tokens, its tokens included."""
        body = {"prompt": prompt, "n_predict": 12, "temperature": 0, "return_tokens": True, **more}
        async with self.client() as client:
            return json.loads((await client.post("/completion", body)).body)

    async def saved_one(self) -> tuple[Messages, Manifest]:
        """Have one long conversation saved; return its next turn, and the manifest."""
        async with self.up():
            messages = await self.converse()
        (kept,) = self.store.list_saved("chat")
        return messages, kept

    async def converse(self, begin: str = "hello ") -> Messages:
        """Have a long conversation; return its next turn."""
        messages = [{"role": "user", "content": begin + LONG}]
        said, _ = await self.ask(messages)
        return [
            *messages,
            {"role": "assistant", "content": said},
            {"role": "user", "content": "and then"},
        ]
