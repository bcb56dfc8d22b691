"""Reads, saves, restores, refreshes and erases the slots of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import orjson

from proxy.upstream.slots import SlotState, parse_slots
from supervisor.engine_client.client import EngineClient, EngineUnreachable, ErrorResponse

# Measured on build 10434, and held by tests against the real engine:
#
# - An id is taken modulo the number of slots: action 7 of 2 slots runs on slot 1.
# - An action on a busy slot waits until that is idle, and delays nothing else.
# - A file is written in place. A full disk is answered with 500 and leaves a partial file.
# - A truncated file ends the engine; so only verified files may be restored.
# - A slot that was restored and never used since does not report how many tokens it holds.
# - The contents of idle slots are also put into cache-ram whenever a request starts elsewhere, but
#   after that request has looked there for its own. One that names a slot does not look there.
# - A request of no tokens leaves a slot as it is, and counts as its latest.
#
# No action has a deadline of its own. Source: tools/server/README.md of llama.cpp, from
# "POST /slots/{id_slot}?action=save" on.


@dataclass(frozen=True, slots=True)
class SlotFileInfo:
    """The content of a slot file, as the engine reports it.

    Attributes:
        duration_s: For which the engine wrote or read it, and computed nothing; 0 where it does not
            say.
    """

    tokens: int
    size_bytes: int
    duration_s: float = field(default=0.0, compare=False)


async def get_slots(client: EngineClient) -> tuple[SlotState, ...] | ErrorResponse:
    """Read the state of every slot.

    Raises:
        EngineUnreachable: No response, or not a list of slots.
    """
    response = await client.get("/slots")
    if response.error:
        return response.error
    found = parse_slots(response.body)
    if found is None:
        raise EngineUnreachable("GET /slots: not a list of slots")
    return tuple(found)


async def save(client: EngineClient, id_slot: int, filename: str) -> SlotFileInfo | ErrorResponse:
    """Write a slot's KV cache into the engine's directory for slot files."""
    return await _transfer(client, id_slot, "save", filename, ("n_saved", "n_written"))


async def restore(
    client: EngineClient, id_slot: int, filename: str
) -> SlotFileInfo | ErrorResponse:
    """Fill a slot from a file of that directory, which must have been verified."""
    return await _transfer(client, id_slot, "restore", filename, ("n_restored", "n_read"))


async def refresh_slot(client: EngineClient, id_slot: int) -> None:
    """Mark a slot as the latest used, by a request of no tokens; a rejection is ignored."""
    await client.post("/completion", {"prompt": [[]], "n_predict": 0, "id_slot": id_slot})


async def cached_tokens(
    client: EngineClient, id_slot: int, prompt: Sequence[int]
) -> int | ErrorResponse:
    """Continue a prompt of tokens in a slot; return how many of them it held already.

    It generates some tokens, so that the engine drafts if it does. Counted by those computed, which
    older builds report too.

    Raises:
        EngineUnreachable: No response.
    """
    body = {"prompt": list(prompt), "n_predict": 8, "id_slot": id_slot, "cache_prompt": True}
    response = await client.post("/completion", body)
    if response.error:
        return response.error
    try:
        return len(prompt) - int(orjson.loads(response.body)["timings"]["prompt_n"])
    except (ValueError, TypeError, KeyError) as error:
        return ErrorResponse(response.status, f"no timings: {error!r}")


async def erase(client: EngineClient, id_slot: int) -> None:
    """Discard a slot's KV cache."""
    await client.post(f"/slots/{id_slot}?action=erase", {})


async def _transfer(
    client: EngineClient, id_slot: int, action: str, filename: str, keys: tuple[str, str]
) -> SlotFileInfo | ErrorResponse:
    path = f"/slots/{id_slot}?action={action}"
    response = await client.post(path, {"filename": filename})
    if response.error:
        return response.error
    try:
        members = orjson.loads(response.body)
        duration_ms = float(members.get("timings", {}).get(f"{action}_ms", 0.0))
        tokens, size_bytes = (int(members[key]) for key in keys)
        return SlotFileInfo(tokens, size_bytes, duration_ms / 1000)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise EngineUnreachable(f"POST {path}: {error!r}") from error
