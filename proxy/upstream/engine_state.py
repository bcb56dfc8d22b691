"""Reads an engine's slots (`/slots`) and metrics (`/metrics`); refreshes, copies and clears slots.

If `/slots` is polled at 1 Hz or more, the engine notices late that clients have disconnected.

Source: tools/server/README.md of llama.cpp, GET /slots; builds 10434 and 11434. Prometheus text
exposition format 0.0.4.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import orjson
from multidict import CIMultiDict
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from proxy.common.headers import JSON
from proxy.errors import ProxyError, UpstreamFailed, UpstreamTimeout
from proxy.settings import ProxySettings
from proxy.upstream.client import FetchedBody, UpstreamRequest, fetch, get_request
from proxy.upstream.upstream import Upstream

_TIMEOUT_S: Final = 2.0
_MAX_BYTES: Final = 4 * 1024**2
# A prompt batch in progress takes about half a second.
_REFRESH_TIMEOUT_S: Final = 1.0
_CLEAR_TIMEOUT_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class SlotState:
    id_slot: int
    task: int  # Number of the slot's last task, increasing; -1 for none.
    tokens: int  # Tokens in the slot; 0 if it was never used.
    is_busy: bool
    n_ctx: int = 0  # Context size of the slot in tokens; 0 if not reported.


async def get_slots(
    upstream: Upstream, settings: ProxySettings, timeout_s: float = _TIMEOUT_S
) -> list[SlotState] | None:
    """Return the slots of an instance; None if it does not report them.

    An engine answers between two batches, so this may take seconds.

    Raises UpstreamTimeout: it is reachable but busy.
    """
    try:
        page = await fetch(upstream, get_request("/slots"), settings, timeout_s, _MAX_BYTES)
    except UpstreamTimeout:
        raise
    except ProxyError:
        return None
    return parse_slots(page.body)


async def refresh_slots(
    upstream: Upstream, slots: Mapping[int, object], settings: ProxySettings
) -> None:
    """Use idle slots without changing their caches, so that another slot is least recently used.

    `slots` are their ids, each with the `lora` of the requests that computed its content; None if
    requests of the model have none. Without it, the engine would later assume that no adapter
    computed the content; with another value, it drops the content.

    Failures are ignored; the engine then takes another slot than intended.

    Source: an empty prompt ends before it begins; server-context.cpp, SLOT_STATE_STARTED. Measured
    on build 10434.
    """

    async def refresh(slot: int, lora: object) -> None:
        with suppress(ProxyError):
            members = {"prompt": [[]], "n_predict": 0, "id_slot": slot}
            if lora:
                members["lora"] = lora
            await _complete(upstream, members, settings, _REFRESH_TIMEOUT_S)

    async with asyncio.TaskGroup() as group:
        for slot, lora in slots.items():
            group.create_task(refresh(slot, lora))


async def copy_slots(upstream: Upstream, settings: ProxySettings) -> int | None:
    """Make an engine copy all of its idle slots to its host cache, without changing them.

    Returns the slot that it used for that, the least recently used one; None if it failed.

    Source: measured on build 10434; server-context.cpp, get_available_slot.
    """
    with suppress(ProxyError, ValueError, AttributeError):
        members = {"prompt": [[]], "n_predict": 0}
        page = await _complete(upstream, members, settings, _REFRESH_TIMEOUT_S)
        number = orjson.loads(page.body).get("id_slot")
        return number if isinstance(number, int) else None
    return None


async def clear_slots(upstream: Upstream, settings: ProxySettings) -> None:
    """Leave one token in each slot of an engine without requests.

    Raises:
        UpstreamFailed, UpstreamTimeout: A slot may still have its old content.

    Source: measured on build 10434, also for models that make vectors.
    """
    for slot in range(upstream.slots):
        members = {"prompt": [0], "n_predict": 0, "cache_prompt": False, "id_slot": slot}
        page = await _complete(upstream, members, settings, _CLEAR_TIMEOUT_S)
        if page.status != HTTPStatus.OK:
            raise UpstreamFailed(
                f"{upstream.name} did not clear other keys' prompts from its slots"
            )


async def _complete(
    upstream: Upstream, members: Mapping[str, Any], settings: ProxySettings, timeout_s: float
) -> FetchedBody:
    headers = CIMultiDict({"Content-Type": JSON})
    request = UpstreamRequest("POST", "/completion", "", headers, orjson.dumps(members))
    return await fetch(upstream, request, settings, timeout_s, _MAX_BYTES)


def parse_slots(page: bytes) -> list[SlotState] | None:
    """Return the slots in a body of `/slots`; None if it is not a list of slots."""
    with suppress(orjson.JSONDecodeError):
        if isinstance(slots := orjson.loads(page), list):
            return [_slot_state(slot) for slot in slots if isinstance(slot, dict)]
    return None


_FIGURES: Final = (("id", -1), ("id_task", -1), ("n_prompt_tokens", 0), ("n_ctx", 0))


def _slot_state(slot: Mapping[str, Any]) -> SlotState:
    found = ((slot.get(name), default) for name, default in _FIGURES)
    numbers = (figure if isinstance(figure, int) else default for figure, default in found)
    id_slot, task, tokens, n_ctx = numbers
    return SlotState(id_slot, task, tokens, slot.get("is_processing") is True, n_ctx)


PREFIX: Final = "llamacpp:"


def parse_metrics(text: str) -> list[Metric]:
    """Return the engine's own metrics; none if the text is no page of metrics."""
    with suppress(ValueError):
        families = text_string_to_metric_families(text)
        return [family for family in families if family.name.startswith(PREFIX)]
    return []


def plain_values(text: str) -> dict[str, float]:
    """Return the values without labels, by name without `llamacpp:`; of counters with `_total`."""
    return {
        sample.name.removeprefix(PREFIX): float(sample.value)
        for family in parse_metrics(text)
        for sample in family.samples
        if not sample.labels
    }
