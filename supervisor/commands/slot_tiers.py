"""`corral slots`: where the prompts of each model are kept, and what that saved."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from supervisor.control.client import Client
from supervisor.control.slot_messages import (
    CachesStatus,
    CacheStatus,
    SlotDiskStatus,
    SlotFileStatus,
    TierStatus,
)
from supervisor.errors import NotRunning
from supervisor.host.paths import directories
from supervisor.output import CommandResult, duration, size, table

_HEAD: Final = ("MODEL", "TIER", "HOLDS", "PROMPTS", "TOKENS", "SAVED")
_NONE: Final = "-"
_SHORT_S: Final = 60
_SKIPPED: Final = {"cost": "it did not pay", "limit": "the limits were reached"}
_OFFLINE: Final = "the daemon is not running: only what is on disk is known"


def show_tiers() -> CommandResult:
    """Show the tiers of all models; without a daemon what is on disk."""
    where, notes = directories(), []
    try:
        found = Client(where.control_socket).caches()
    except NotRunning:
        from supervisor.control.cache_status import saved_status
        from supervisor.slot_store.config import store_in

        found, notes = saved_status(store_in(where).saved()), [_OFFLINE]
    if found["disk"]["paused"]:
        notes.append("the disk failed: nothing is saved for a while (corral logs says why)")
    notes += [
        f"{one['model']} saves nothing on disk: {one['not_saved_reason']}"
        for one in found["models"]
        if one["not_saved_reason"]
    ]
    return CommandResult(found, tiers_text(found, datetime.now(tz=UTC)), tuple(notes))


def tiers_text(found: CachesStatus, now: datetime) -> str:
    models = found["models"]
    if not models:
        return "no model, and nothing on disk"
    rows = [row for one in models for row in _rows(one)]
    lines = [line for one in models for line in _files(one, now)]
    return "\n".join([table(_HEAD, rows), *lines, *_disk(found["disk"])])


def _rows(one: CacheStatus) -> Iterator[tuple[str, ...]]:
    model = one["model"]
    for tier in one["tiers"]:
        name = tier["tier"].replace("_", " ")
        figures = _figures(tier["prompts"], tier["found_tokens"], one)
        yield model, name, _holds(tier, one), *figures, _saved(tier)
        model = ""
    none = one["prompts"] - sum(tier["prompts"] for tier in one["tiers"])
    yield "", "computed", "", *_figures(none, one["computed_tokens"], one), _NONE


def _figures(prompts: int, tokens: int, one: CacheStatus) -> tuple[str, str]:
    if not one["prompt_tokens"]:
        return _NONE, _NONE
    return str(prompts), f"{tokens} ({tokens / one['prompt_tokens']:.0%})"


def _saved(tier: TierStatus) -> str:
    if not tier["found_tokens"]:
        return _NONE
    seconds = tier["saved_s"]
    return f"{seconds:.1f}s" if seconds < _SHORT_S else duration(seconds)


def _holds(tier: TierStatus, one: CacheStatus) -> str:
    if tier["tier"] == "slot" and not one["slots"]:
        return _NONE  # no instance runs
    if tier["conversations"] is None:
        limit = tier["limit_bytes"]
        return "no limit" if limit is None else f"up to {size(limit)}" if limit else _NONE
    if tier["tier"] == "disk" and not tier["conversations"]:
        return _NONE
    parts = [_count(tier["conversations"], "conversation"), f"{tier['tokens']} tokens"]
    if tier["tier"] == "slot":
        parts.append(_count(one["slots"], "slot"))
    if tier["size_bytes"] is not None:
        limit = tier["limit_bytes"]
        parts.append(size(tier["size_bytes"]) + (f" of {size(limit)}" if limit else ""))
    return ", ".join(parts)


def _files(one: CacheStatus, now: datetime) -> Iterator[str]:
    """Yield what slot files took since the daemon started, and how old the oldest is."""
    saves, restores = one["saves"], one["restores"]
    parts = [*_operation(saves, "saved"), *_operation(restores, "restored")]
    if failures := saves["failures"] + restores["failures"]:
        parts.append(f"{failures} failed")
    parts += [f"{count} saves skipped ({_SKIPPED[why]})" for why, count in one["skipped"].items()]
    if one["oldest_at"]:
        age_s = (now - datetime.fromisoformat(one["oldest_at"])).total_seconds()
        parts.append(f"the oldest is {duration(max(0.0, age_s))} old")
    if parts:
        yield f"{one['model']} on disk: {', '.join(parts)}"


def _disk(disk: SlotDiskStatus) -> Iterator[str]:
    limit, written, write_limit = (
        disk["limit_bytes"],
        disk["written_bytes"],
        disk["write_limit_bytes"],
    )
    if limit is not None and written is not None and write_limit is not None:
        room = f"{size(disk['size_bytes'])} of {size(limit)}"
        yield f"disk: {room}; written in the last hour: {size(written)} of {size(write_limit)}"


def _operation(done: SlotFileStatus, verb: str) -> Iterator[str]:
    if done["count"]:
        mean_ms = 1000 * done["duration_s"] / done["count"]
        yield f"{done['count']} {verb} ({size(done['size_bytes'])}, {mean_ms:.0f} ms each)"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
