"""Tries whether an engine uses restored slots, once for each cache key.

What a build makes of the slots of a hybrid, recurrent or vision model stands nowhere in its help.
So a file is restored twice: first to ask for its tokens and one more, as a conversation that goes
on does, and to see how many of them the engine finds; then to keep. A file that holds pictures
cannot be asked for by its tokens: there the first response to its conversation shows it.

Source: measured on build 10434: of 1 077 tokens in the slot of a hybrid model it found all, of 790
in that of a model with a sliding window none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from http import HTTPStatus
from operator import attrgetter
from typing import Final

from supervisor.engine_client import slots
from supervisor.engine_client.client import EngineClient, EngineUnreachable, ErrorResponse
from supervisor.engine_client.slots import SlotFileInfo
from supervisor.slot_store.manifest import Manifest
from supervisor.slot_store.outcomes import RestoreOutcome
from supervisor.slot_store.slot_file import InvalidSlotFile
from supervisor.slot_store.task import SlotTask

UNUSED: Final = "its engine used nothing of a restored conversation"
_FAILED: Final = "its engine failed over a restored conversation"
_ENDED: Final = "its engine ended when it used a restored conversation"
# An engine that uses nothing computes all tokens; the shortest file has the fewest.
_TIMEOUT_S: Final = 30.0

RestoreOne = Callable[[Manifest, int], Awaitable[SlotFileInfo | None]]


async def uses_restored(
    task: SlotTask,
    client: EngineClient,
    manifests: Sequence[Manifest],
    id_slot: int,
    restore_one: RestoreOne,
) -> bool:
    """Return whether restored slots are used, as far as that is known; leaves the slot empty.

    Raises:
        EngineUnreachable: The engine does not answer.
    """
    if known := task.store.outcomes.get(task.key):
        return not known.problem
    outcome = None
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(_TIMEOUT_S):
                outcome = await _try(task, client, manifests, id_slot, restore_one)
    except EngineUnreachable:
        outcome = RestoreOutcome(task.owner.model, problem=_ENDED)
        raise
    finally:
        if outcome:
            note_outcome(task, outcome)
    return outcome is None or not outcome.problem


def note_outcome(task: SlotTask, outcome: RestoreOutcome) -> None:
    """Remember what became of the first restored slot, and report a problem."""
    task.store.outcomes.set(task.key, outcome)
    if outcome.problem:
        expected, found = outcome.expected_tokens, outcome.found_tokens
        task.emit("slots.restore_unused", expected=expected, cached=found)


async def _try(
    task: SlotTask,
    client: EngineClient,
    manifests: Sequence[Manifest],
    id_slot: int,
    restore_one: RestoreOne,
) -> RestoreOutcome | None:
    """Try the shortest conversation without pictures; None if there is none."""
    for manifest in sorted(manifests, key=attrgetter("tokens")):
        tokens = await asyncio.to_thread(_text, task, manifest)
        if tokens and await restore_one(manifest, id_slot):
            found = await slots.cached_tokens(client, id_slot, (*tokens, tokens[-1]))
            await slots.erase(client, id_slot)
            return _outcome(task.owner.model, len(tokens), found)
    return None


def _outcome(model: str, tokens: int, found: int | ErrorResponse) -> RestoreOutcome | None:
    if not isinstance(found, ErrorResponse):
        return RestoreOutcome(model, tokens, found, "" if found else UNUSED)
    if found.status < HTTPStatus.INTERNAL_SERVER_ERROR:
        return None  # the request was wrong or too long, or the build reports no figures
    return RestoreOutcome(model, tokens, 0, f"{_FAILED}: {found.message}")


def _text(task: SlotTask, manifest: Manifest) -> tuple[int, ...]:
    """Return the tokens of a file; none if it is invalid or holds pictures."""
    try:
        header = task.store.header(manifest)
    except InvalidSlotFile:  # found again when it is restored
        return ()
    return () if header.media else header.tokens
