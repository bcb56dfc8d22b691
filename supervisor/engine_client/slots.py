"""Asks an engine about its slots, and has them saved, restored and erased.

What was learnt of build 10434, and is held by tests against the real engine:

- An id is taken modulo the number of slots: order 7 of 2 slots is carried out on slot 1.
- An order at a busy slot waits until that is idle, and holds up nobody else.
- A file is written in place. A full disk is answered with 500 and leaves what was written.
- A file that is cut short ends the engine; so only what was verified may be restored.
- A slot that was restored, and was never used before or since, does not tell how much it holds.
- What idle slots hold is put into cache-ram as well whenever a request begins elsewhere, but after
  that request has looked there for its own. One that names a slot does not look there.
- A request of no tokens leaves a slot as it is, and counts as its latest.

Source: tools/server/README.md of llama.cpp, "POST /slots/{id_slot}?action=save" and what follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from supervisor.engine_client.client import (
    EngineClient,
    EngineUnreachable,
    ErrorResponse,
    error_response,
)


@dataclass(frozen=True, slots=True)
class Slot:
    """What an engine says of one of its slots.

    Attributes:
        id_slot: Which.
        is_processing: Whether it answers a request now.
        id_task: Its latest request, counted over all slots; None while it had none since the
            engine started, whatever was restored into it.
        tokens: How many it holds; 0 where it does not tell.
        n_ctx: How many it has room for.
    """

    id_slot: int
    is_processing: bool = False
    id_task: int | None = None
    tokens: int = 0
    n_ctx: int = 0


@dataclass(frozen=True, slots=True)
class SlotFileInfo:
    """What was written to a slot file, or read from it.

    Attributes:
        tokens: How many tokens.
        size_bytes: How many bytes.
    """

    tokens: int
    size_bytes: int


async def get_slots(client: EngineClient) -> tuple[Slot, ...] | ErrorResponse:
    """Return what each slot does and holds.

    Raises:
        EngineUnreachable: No answer, or one of another shape.
    """
    answer = await client.get("/slots")
    if answer.status_code != 200:
        return error_response(answer)
    try:
        return tuple(map(_slot, answer.json()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise EngineUnreachable(f"GET /slots: {error!r}") from error


async def save(client: EngineClient, id_slot: int, filename: str) -> SlotFileInfo | ErrorResponse:
    """Have what a slot holds written into the engine's directory for slot files.

    Raises:
        EngineUnreachable: No answer. There is no deadline but the caller's.
    """
    return await _move(client, id_slot, "save", filename, ("n_saved", "n_written"))


async def restore(
    client: EngineClient, id_slot: int, filename: str
) -> SlotFileInfo | ErrorResponse:
    """Have a slot filled from a file of that directory, which must have been verified.

    Raises:
        EngineUnreachable: No answer. There is no deadline but the caller's.
    """
    return await _move(client, id_slot, "restore", filename, ("n_restored", "n_read"))


async def refresh_slot(client: EngineClient, id_slot: int) -> None:
    """Have a slot be used, and hold what it holds: a request of no tokens ends as it begins.

    An engine that refuses that is left alone.

    Raises:
        EngineUnreachable: No answer. There is no deadline but the caller's.
    """
    await client.post("/completion", {"prompt": [[]], "n_predict": 0, "id_slot": id_slot})


async def erase(client: EngineClient, id_slot: int) -> None:
    """Have a slot forget what it holds.

    Raises:
        EngineUnreachable: No answer. There is no deadline but the caller's.
    """
    await client.post(f"/slots/{id_slot}?action=erase", {})


def _slot(told: dict[str, Any]) -> Slot:
    return Slot(
        id_slot=int(told["id"]),
        is_processing=bool(told["is_processing"]),
        id_task=told.get("id_task"),
        tokens=int(told.get("n_prompt_tokens") or 0),
        n_ctx=int(told["n_ctx"]),
    )


async def _move(
    client: EngineClient, id_slot: int, action: str, filename: str, keys: tuple[str, str]
) -> SlotFileInfo | ErrorResponse:
    path = f"/slots/{id_slot}?action={action}"
    answer = await client.post(path, {"filename": filename})
    if answer.status_code != 200:
        return error_response(answer)
    try:
        told = answer.json()
        return SlotFileInfo(*(int(told[key]) for key in keys))
    except (ValueError, TypeError, KeyError) as error:
        raise EngineUnreachable(f"POST {path}: {error!r}") from error
