"""What an engine's own page says of its slots.

Ask seldom: who asks each second or more often keeps an engine from noticing that others have left.
Source: tools/server/README.md of llama.cpp, GET /slots; builds 10434 and 11434.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

from proxy.engine.page import fetch, question
from proxy.engine.upstream import Upstream
from proxy.errors import ProxyError, UpstreamTimeout
from proxy.settings import ProxySettings

_TIMEOUT_S: Final = 2.0
_MAX_BYTES: Final = 4 * 1024**2


@dataclass(frozen=True, slots=True)
class Seen:
    """One slot.

    Attributes:
        slot: Its number, `id_slot`.
        task: The number of its last task, which grows from one task to the next; -1 for none.
        tokens: Tokens that it holds; 0 where it was never used.
        is_busy: Whether it is in use.
    """

    slot: int
    task: int
    tokens: int
    is_busy: bool


async def look(upstream: Upstream, settings: ProxySettings) -> list[Seen] | None:
    """Return every slot of an instance, or None where it does not say.

    Raises:
        UpstreamTimeout: It is there, and busy with something.
    """
    try:
        page = await fetch(upstream, question("/slots"), settings, _TIMEOUT_S, _MAX_BYTES)
    except UpstreamTimeout:
        raise
    except ProxyError:
        return None
    return read_page(page.body)


def read_page(page: bytes) -> list[Seen] | None:
    """Return the slots that a page lists, or None where it is no such page."""
    try:
        slots = orjson.loads(page)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(slots, list):
        return None
    return [_seen(slot) for slot in slots if isinstance(slot, dict)]


def _seen(slot: Mapping[str, Any]) -> Seen:
    def number(name: str, default: int) -> int:
        found = slot.get(name)
        return found if isinstance(found, int) else default

    return Seen(
        slot=number("id", -1),
        task=number("id_task", -1),
        tokens=number("n_prompt_tokens", 0),
        is_busy=slot.get("is_processing") is True,
    )
