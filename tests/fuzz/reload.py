"""Gives a running daemon mutated settings, keys and models, under observation."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from dataclasses import dataclass, field
from random import Random
from typing import Final

from fuzz import gguf, keys, settings
from fuzz.client import send
from fuzz.daemon import Daemon
from fuzz.finding import Example, Findings, Limits, Report
from fuzz.observer import DEATHS_MAX, Observer
from fuzz.request import KEY, Input, credentials, head, post

from supervisor.errors import CorralError

_FUZZED: Final = '\n[models.fuzzed]\npath = "{path}"\npreload = false\n'
Address = tuple[str, int]
_SETTLE_S: Final = 0.1


@dataclass
class Reload:
    """One daemon, not yet started, whose files change."""

    daemon: Daemon
    seed: int
    limits: Limits
    findings: Findings
    _last: list[Example] = field(default_factory=list)

    async def run(self) -> Report:
        self.daemon.start()
        observer = Observer(self.daemon, self._found, self.daemon.address)
        async with asyncio.TaskGroup() as tasks:
            observing = tasks.create_task(observer.run())
            while (number := self.limits.take()) is not None and observer.deaths < DEATHS_MAX:
                await self._change(number, observer)
            observing.cancel()
        observer.read_log()
        if code := self.daemon.stop():
            self._found(f"it ended with code {code}", "", time.monotonic())
        return Report("reload", self.limits.taken, observer.figures())

    async def _change(self, number: int, observer: Observer) -> None:
        await observer.up.wait()
        random = Random(f"{self.seed}/reload/{number}")
        change = random.choice((self._settings, self._settings, self._keys, self._model))
        try:
            await change(number, random, observer.address)
        finally:
            self.daemon.restore_files()
        await asyncio.sleep(_SETTLE_S)
        asked = Input("after", (head("GET", "/v1/models", (f"Authorization: Bearer {KEY}",)),))
        answer = await send(observer.address, asked)
        # An invalid keys file is read again within a second.
        if answer.status not in {200, 401, 503} and self.daemon.is_alive():
            self._found(f"{answer.status} ({answer.ending}) afterwards", "", time.monotonic())

    async def _settings(self, number: int, random: Random, _address: Address) -> None:
        """Write settings; valid ones could fill the machine, so they are only checked."""
        data = settings.text(self.seed, number)
        self._note(f"{number}.toml", data)
        self.daemon.settings_file.write_bytes(data)
        is_right = await self._reload(dry_run=True)
        if not is_right:
            if random.random() < 0.5:
                self.daemon.hang_up()
            await self._reload(dry_run=False)

    async def _keys(self, number: int, random: Random, address: Address) -> None:
        data = keys.text(self.seed, number)
        self._note(f"{number}.keys.toml", data)
        self.daemon.api_keys_file.write_bytes(data)
        for _ in range(3):
            asked = Input("keys", (head("GET", "/v1/models", credentials(random)),))
            answer = await send(address, asked)
            if answer.status not in {200, 401, 429, 503}:
                self._found(f"{answer.status} with a changed keys file", "", time.monotonic())

    async def _model(self, number: int, random: Random, address: Address) -> None:
        """Add a model with a mutated file, request it, and remove it."""
        path = self.daemon.home / f"{number}.gguf"
        data = gguf.data(self.seed, number)
        path.write_bytes(data)
        self._note(path.name, data)
        text = self.daemon.settings + _FUZZED.format(path=path)
        self.daemon.settings_file.write_text(text, "utf-8")
        await self._reload(dry_run=random.random() < 0.2)
        body = json.dumps({"model": "fuzzed", "prompt": "a", "n_predict": 1}).encode()
        asked = post("/completion", body, (f"Authorization: Bearer {KEY}",))
        for raw in (head("GET", "/props?model=fuzzed", (f"Authorization: Bearer {KEY}",)), asked):
            answer = await send(address, Input("model", (raw,), leave_after_s=10))
            if answer.status == 500:
                self._found(
                    "500 for a model whose file is wrong", str(answer.body), time.monotonic()
                )
        self.daemon.restore_files()
        await self._reload(dry_run=False)
        path.unlink()

    async def _reload(self, *, dry_run: bool) -> bool:
        """Reload; return whether the settings were valid."""
        try:
            await asyncio.to_thread(lambda: list(self.daemon.client.reload(dry_run=dry_run)))
        except CorralError as error:
            if "already running" in error.message and self.daemon.is_alive():  # that of SIGHUP
                await asyncio.sleep(_SETTLE_S)
                return await self._reload(dry_run=dry_run)
            if not self.daemon.is_alive() or error.exit_code != 78:
                self._found(f"reload: {type(error).__name__}: {error}"[:120], "", time.monotonic())
            return False
        return True

    def _note(self, name: str, data: bytes) -> None:
        self._last = [Example(name, data), *self._last[:9]]

    def _found(self, what: str, detail: str, _from_s: float) -> None:
        examples = [
            dataclasses.replace(entry, how="the last" if at == 0 else "before")
            for at, entry in enumerate(self._last)
        ]
        self.findings.add("reload", what, detail, examples)
