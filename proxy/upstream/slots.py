"""An engine's slots: what its own page says of them, and how a request comes to a certain one.

Ask seldom: who asks each second or more often keeps an engine from noticing that others have left.
Source: tools/server/README.md of llama.cpp, GET /slots; builds 10434 and 11434.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import orjson
from multidict import CIMultiDict

from proxy.errors import ProxyError, UpstreamTimeout
from proxy.headers import JSON
from proxy.settings import ProxySettings
from proxy.upstream.client import UpstreamRequest
from proxy.upstream.fetch import fetch, get_request
from proxy.upstream.upstream import Upstream

_TIMEOUT_S: Final = 2.0
_MAX_BYTES: Final = 4 * 1024**2
# A batch of prompt that is being computed takes about half a second.
_TOUCH_TIMEOUT_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class SlotState:
    """One slot.

    Attributes:
        id_slot: Its number, `id_slot`.
        task: The number of its last task, which grows from one task to the next; -1 for none.
        tokens: Tokens that it holds; 0 where it was never used.
        is_busy: Whether it is in use.
        n_ctx: Tokens that it has room for; 0 where it does not say.
    """

    id_slot: int
    task: int
    tokens: int
    is_busy: bool
    n_ctx: int = 0


async def get_slots(upstream: Upstream, settings: ProxySettings) -> list[SlotState] | None:
    """Return every slot of an instance, or None where it does not say.

    Raises:
        UpstreamTimeout: It is there, and busy with something.
    """
    try:
        page = await fetch(upstream, get_request("/slots"), settings, _TIMEOUT_S, _MAX_BYTES)
    except UpstreamTimeout:
        raise
    except ProxyError:
        return None
    return parse_slots(page.body)


async def refresh_slots(upstream: Upstream, slots: Iterable[int], settings: ProxySettings) -> None:
    """Have idle slots be used, and still hold what they hold, so that others are older.

    What fails is let go: the engine then takes another slot than the one that was meant.

    Source: an empty prompt ends before it begins; server-context.cpp, SLOT_STATE_STARTED. Measured
    on build 10434.
    """
    async with asyncio.TaskGroup() as group:
        for slot in slots:
            group.create_task(_refresh(upstream, slot, settings))


async def _refresh(upstream: Upstream, slot: int, settings: ProxySettings) -> None:
    body = orjson.dumps({"prompt": [[]], "n_predict": 0, "id_slot": slot})
    upstream_request = UpstreamRequest(
        "POST", "/completion", "", CIMultiDict({"Content-Type": JSON}), body
    )
    with suppress(ProxyError):
        await fetch(upstream, upstream_request, settings, _TOUCH_TIMEOUT_S, _MAX_BYTES)


def parse_slots(page: bytes) -> list[SlotState] | None:
    """Return the slots that a page lists, or None where it is no such page."""
    try:
        slots = orjson.loads(page)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(slots, list):
        return None
    return [_slot_state(slot) for slot in slots if isinstance(slot, dict)]


def _slot_state(slot: Mapping[str, Any]) -> SlotState:
    def number(name: str, default: int) -> int:
        found = slot.get(name)
        return found if isinstance(found, int) else default

    return SlotState(
        id_slot=number("id", -1),
        task=number("id_task", -1),
        tokens=number("n_prompt_tokens", 0),
        is_busy=slot.get("is_processing") is True,
        n_ctx=number("n_ctx", 0),
    )
