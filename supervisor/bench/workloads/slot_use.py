"""What the proxy does so that an engine which matches no prompts finds what it has computed.

See proxy/prompt_cache/slot_map.py and proxy/router/slot_selection.py.
"""

from __future__ import annotations

from proxy.upstream.slots import SlotState
from supervisor.engine_client.client import EngineClient, ErrorResponse
from supervisor.engine_client.slots import get_slots, refresh_slot


async def last_used_slot(client: EngineClient) -> int | None:
    """The slot of the latest request; None if the engine does not tell."""
    slots = await _by_use(client)
    return slots[-1].id_slot if slots else None


async def save_idle_slots(client: EngineClient) -> None:
    """Have an idle engine save what its slots hold, where it looks for a new conversation.

    A request of no tokens in the slot used longest ago saves what the others hold; these are used
    after it, and leave that slot to the conversation.
    """
    for slot in await _by_use(client):
        await refresh_slot(client, slot.id_slot)


async def _by_use(client: EngineClient) -> list[SlotState]:
    """The slots, the one used longest ago first; of unused ones the engine takes the last."""
    slots = await get_slots(client)
    if isinstance(slots, ErrorResponse):
        return []
    return sorted(slots, key=lambda one: (one.task, -one.id_slot))
