"""Copies slot files between machines that share no directory: takes, sends, and hands them over.

A request takes the file of its conversation from the machine that a front names
(`proxy.router.node_files`). A daemon that stops offers the files that were used lately to its
nodes, each to one that serves the model; a node copies those that are worth it, and tells fronts in
its next digest that it has them. A copied file is the same as here, encrypted or not, with its
name; like any other it is verified before an engine reads it.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Final

from attrs import define, field

from proxy.cache.fingerprint import SlotFile, decode_fingerprint
from proxy.endpoints.slot_files import StoredSlotFile
from proxy.errors import UpstreamFailed, UpstreamTimeout
from proxy.nodes.configured import ConfiguredNode
from proxy.nodes.slot_files import NodeSlotFiles
from proxy.router.node_files import NodeFile
from proxy.router.router import Router
from supervisor.errors import AccessDenied
from supervisor.events import Emit
from supervisor.settings.schema import SupervisorSettings
from supervisor.slot_store.file_index import CataloguedFile, key_digest
from supervisor.slot_store.manifest import Manifest, ManifestInvalid, load
from supervisor.slot_store.slot_files import SlotFiles
from supervisor.slot_store.store import SlotStore

_NAME: Final = re.compile("[0-9a-f]{16}")
_RECENT: Final = timedelta(hours=1)
_OFFERED_MAX: Final = 256
_OFFERED_AT_ONCE: Final = 8
_TAKEN_AT_ONCE: Final = 2
_HASHES_MAX: Final = 256


@define(eq=False, slots=False)
class SlotExchange:
    """Implements `proxy.router.node_files.NodeFileSource` and `proxy.endpoints` `SlotFileHost`."""

    _files: SlotFiles
    _nodes: NodeSlotFiles
    _router: Router
    _store: Callable[[], SlotStore]
    _limits: Callable[[], SupervisorSettings]
    _emit: Emit
    _hashes: OrderedDict[str, bytes] = field(factory=OrderedDict, init=False)
    _taken_at_once: asyncio.Semaphore = field(
        factory=lambda: asyncio.Semaphore(_TAKEN_AT_ONCE), init=False
    )
    _handed_over: set[str] = field(factory=set, init=False)

    # Taking files.

    async def find(
        self, holder: str, cache_key: str, turn_hashes: Sequence[int], /
    ) -> NodeFile | None:
        try:
            text = await self._nodes.find(holder, cache_key, turn_hashes)
            manifest = self._read(text) if text else None
            return self._node_file(holder, manifest, text) if manifest and text else None
        except (UpstreamFailed, UpstreamTimeout) as error:
            self._emit("slots.take_failed", reason=error.message)
            return None

    async def take(self, file: NodeFile, /) -> bool:
        manifest = self._read(file.manifest)
        return manifest is not None and await self._take(file.holder, manifest) is not None

    async def _take(self, holder: str, manifest: Manifest) -> SlotFile | None:
        store, began_at_s = self._store(), time.monotonic()
        size_bytes = store.content.stored_bytes(manifest)
        try:
            copy = await self._files.run(store.new_copy, manifest)
            try:
                await self._nodes.copy(holder, manifest.name, size_bytes, copy)
                used = replace(manifest, used_at=datetime.now(tz=UTC))
                found = await self._files.adopt(copy, used)
                budget = self._files.budget
                self._files.limits.note_written(size_bytes, budget.write_hour_bytes)
            finally:
                copy.unlink(missing_ok=True)
        except (UpstreamFailed, UpstreamTimeout) as error:
            self._emit("slots.take_failed", reason=error.message)
            return None
        except (OSError, AccessDenied) as error:
            self._emit("slots.take_failed", reason=str(error))
            return None
        self._emit(
            "slots.taken",
            model=manifest.model,
            tokens=manifest.tokens,
            size_bytes=size_bytes,
            duration_ms=round(1000 * (time.monotonic() - began_at_s), 1),
        )
        return found

    def _node_file(self, holder: str, manifest: Manifest, text: str) -> NodeFile:
        size_bytes = self._store().content.stored_bytes(manifest)
        return NodeFile(
            holder,
            key_digest(manifest.model, manifest.identity),
            text,
            manifest.tokens,
            size_bytes,
            self._nodes.transfer_s(holder, size_bytes),
        )

    def _read(self, text: str) -> Manifest | None:
        """Return the manifest of a file that an engine here can use and the store has room for."""
        store = self._store()
        try:
            manifest = store.content.unseal(load(text))
        except ManifestInvalid:
            return None
        key = key_digest(manifest.model, manifest.identity)
        is_usable = any(run.cache_key == key for run in self._router.cache.with_files.values())
        is_ours = _NAME.fullmatch(manifest.name) and store.content.is_readable(manifest)
        if not (is_usable and is_ours) or manifest.name in self._files.catalogue:
            return None
        has_room = self._files.may_save(store.content.stored_bytes(manifest))
        return manifest if has_room and store.shared is None else None

    async def take_offered(
        self, process: str, manifests: Sequence[str], /
    ) -> Sequence[tuple[str, SlotFile]]:
        taken = list[tuple[str, SlotFile]]()

        async def take(text: str) -> None:
            async with self._taken_at_once:
                manifest = self._read(text)
                if manifest is None:
                    return
                file = self._node_file(process, manifest, text)
                its = decode_fingerprint(manifest.fingerprint)
                known = self._files.catalogue.files_of_conversation(file.cache_key, its)
                known_tokens = max((entry.file.tokens for entry in known), default=0)
                is_worth_it = self._router.node_files.pays(file, known_tokens)
                if is_worth_it and (found := await self._take(process, manifest)):
                    taken.append((manifest.model, found))

        async with asyncio.TaskGroup() as group:
            for text in manifests if self._nodes.knows(process) else ():
                group.create_task(take(text))
        return taken

    # Sending files.

    @property
    def send_rate(self) -> float:
        return float(self._limits().slots_send_rate)

    async def manifest(self, cache_key: str, turn_hashes: Sequence[int], /) -> str | None:
        entry = self._files.catalogue.latest_of_turns(cache_key, turn_hashes)
        return await self._text(entry) if entry else None

    async def _text(self, entry: CataloguedFile) -> str | None:
        with suppress(OSError):  # another program deleted it
            return await self._files.run(self._store().manifest_text, entry.manifest)
        return None

    async def stored(self, name: str, /) -> StoredSlotFile | None:
        if (entry := self._files.catalogue.get(name)) is None:
            return None
        store = self._store()
        try:
            if (sha256 := self._hashes.get(name)) is None:
                sha256 = await self._files.run(store.sha256, entry.manifest)
                self._hashes[name] = sha256  # a file never changes
                while len(self._hashes) > _HASHES_MAX:
                    self._hashes.popitem(last=False)
        except OSError:
            return None
        size_bytes = store.content.stored_bytes(entry.manifest)
        return StoredSlotFile(store.path(entry.manifest), size_bytes, sha256)

    # At the end of this daemon.

    @property
    def hands_over(self) -> bool:
        """Whether files are handed over at the end."""
        limits = self._limits()
        is_on = limits.persist_slots and limits.slots_hand_over_s > 0 and limits.slots_send_rate > 0
        return is_on and self._store().shared is None and self._nodes.has_peers

    async def hand_over(self) -> None:
        """Have nodes copy the files that were used lately and are not handed over yet."""
        offers = self._to_hand_over()
        async with asyncio.TaskGroup() as group:
            for node, entries in offers.items():
                group.create_task(self._offer(node, entries))

    def _to_hand_over(self) -> dict[ConfiguredNode, list[CataloguedFile]]:
        """Return which files to offer to which nodes, the latest used first."""
        since = datetime.now(tz=UTC) - _RECENT
        found = [
            entry
            for entry in self._files.catalogue.files()
            if entry.file.fingerprint.turn_hashes
            and entry.manifest.used_at >= since
            and entry.file.name not in self._handed_over
        ]
        found.sort(key=lambda entry: entry.manifest.used_at, reverse=True)
        offers = defaultdict[ConfiguredNode, list[CataloguedFile]](list)
        for number, entry in enumerate(found[:_OFFERED_MAX]):
            if nodes := self._nodes.peers(entry.manifest.model):
                offers[nodes[number % len(nodes)]].append(entry)
        return offers

    async def _offer(self, node: ConfiguredNode, entries: Sequence[CataloguedFile]) -> None:
        began_at_s, limit_s = time.monotonic(), self._limits().slots_hand_over_s
        taken = list[CataloguedFile]()
        try:
            for begins_at in range(0, len(entries), _OFFERED_AT_ONCE):
                some = entries[begins_at : begins_at + _OFFERED_AT_ONCE]
                texts = [text for entry in some if (text := await self._text(entry))]
                left_s = limit_s - (time.monotonic() - began_at_s)
                self._handed_over.update(entry.file.name for entry in some)
                names = await self._nodes.offer(node, texts, max(0.0, left_s))
                taken += [entry for entry in some if entry.file.name in names]
        except (UpstreamFailed, UpstreamTimeout) as error:
            self._emit("slots.hand_over_failed", node=node.name, reason=error.message)
        if taken:
            self._emit(
                "slots.handed_over",
                node=node.name,
                slots=len(taken),
                tokens=sum(entry.file.tokens for entry in taken),
                size_bytes=sum(entry.file.size_bytes for entry in taken),
                duration_ms=round(1000 * (time.monotonic() - began_at_s), 1),
            )
