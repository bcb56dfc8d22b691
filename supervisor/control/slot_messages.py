"""The JSON of the daemon and its commands about slots and slot files."""

from __future__ import annotations

from typing import TypedDict


class SavedSlot(TypedDict):
    """`saved_at` is ISO 8601 in UTC."""

    name: str
    model: str
    replica: int
    tokens: int
    size_bytes: int
    saved_at: str
    encrypted: bool


class ForgetRequest(TypedDict):
    """What to forget: the saved conversations of a model or of all, or one conversation.

    `conversation`: the beginning of the name of a file; `request`: the id of a request; both None:
    those of `model`, and where that is None too, of all.
    """

    model: str | None
    conversation: str | None
    request: str | None


class ForgottenSlots(TypedDict):
    """What was deleted.

    `emptied`: slots of engines. `in_use`: whether a request in flight is still of it.
    """

    slots: list[SavedSlot]
    emptied: int
    in_use: bool


class TierStatus(TypedDict):
    """One place where prompts are kept: `slot`, `host_cache` or `disk`; None: not known.

    `limit_bytes`: None for no limit of its own. The last three count since the daemon started.
    """

    tier: str
    conversations: int | None
    tokens: int | None
    size_bytes: int | None
    limit_bytes: int | None
    prompts: int
    found_tokens: int
    saved_s: float


class SlotFileStatus(TypedDict):
    """Saves or restores of single slots since the daemon started."""

    count: int
    failures: int
    tokens: int
    size_bytes: int
    duration_s: float


class SlotDiskStatus(TypedDict):
    """The slot files of all models; what only a daemon knows is None without one.

    `written_bytes`: in the last hour; `write_limit_bytes`: the limit of that. `paused`: nothing is
    saved for a while, because the disk failed.
    """

    size_bytes: int
    limit_bytes: int | None
    written_bytes: int | None
    write_limit_bytes: int | None
    paused: bool


class CacheStatus(TypedDict):
    """Where the prompts of one model are kept.

    `skipped`: how many conversations were not saved, by the reason (`cost`, `limit`).

    `slots`: of all its instances. `prompts`, `prompt_tokens`, `computed_tokens`: answered since the
    daemon started. `oldest_at`: of what is on disk, ISO 8601 in UTC.
    """

    model: str
    slots: int
    prompts: int
    prompt_tokens: int
    computed_tokens: int
    tiers: list[TierStatus]
    oldest_at: str | None
    saves: SlotFileStatus
    restores: SlotFileStatus
    skipped: dict[str, int]
    not_saved_reason: str | None


class CachesStatus(TypedDict):
    """Where prompts are kept."""

    models: list[CacheStatus]
    disk: SlotDiskStatus
