"""The part of a prompt that was found in the caches: tokens, tiers, and the cause of a miss.

`cache.miss_cause` determines the cause; `explanation` puts it into sentences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final, Literal, NamedTuple


class Tier(StrEnum):
    SLOT = "slot"
    """In the request's slot."""
    HOST_CACHE = "host_cache"
    """In the engine's copies in main memory (`cache-ram`)."""
    DISK = "disk"
    """In a slot file, restored for the request or at the start of the process."""
    NONE = "none"


class NoFile(StrEnum):
    OFF = "off"
    """Its instance neither saves nor restores slots."""
    COST = "cost"
    """Saving it did not pay when its slot was taken."""
    LIMIT = "limit"
    """The limit of disk space, or of writes per hour, was reached."""
    DELETED = "deleted"
    """A file existed: it was deleted by age or budget, or could not be read."""
    OTHER_BUILD = "other_build"
    """A file exists, of another build or other options."""
    FAILED = "failed"
    """A file existed, and its restore failed."""


# A shorter prompt is computed in one batch, so it is neither remembered nor compared.
TOKENS_MIN: Final = 64


class Cause(StrEnum):
    # About the cache:
    ALL_FOUND = "all_found"
    FIRST_REQUEST = "first_request"
    SHORT_PROMPT = "short_prompt"
    SYSTEM_PROMPT_CHANGED = "system_prompt_changed"
    TOOLS_CHANGED = "tools_changed"
    HISTORY_TRUNCATED = "history_truncated"
    MESSAGE_CHANGED = "message_changed"
    OTHER_INSTANCE = "other_instance"
    SLOT_EVICTED = "slot_evicted"
    SLOT_BUSY = "slot_busy"
    MODEL_UNLOADED = "model_unloaded"
    ENGINE_RESTARTED = "engine_restarted"
    SLIDING_WINDOW = "sliding_window"
    RECURRENT_STATE = "recurrent_state"
    CACHE_OFF = "cache_off"
    NOT_FOUND = "not_found"
    # About an error:
    ERROR = "error"
    # About the time:
    QUEUE = "queue"
    PAUSED = "paused"
    LOADING = "loading"
    SLOW_CLIENT = "slow_client"
    # About the answer:
    BROKEN_TOOL_CALL = "broken_tool_call"


PLAIN: Final = frozenset({Cause.ALL_FOUND, Cause.FIRST_REQUEST, Cause.SHORT_PROMPT})
# Causes for which the model also had to be loaded.
WITH_LOAD: Final = frozenset({Cause.MODEL_UNLOADED, Cause.ENGINE_RESTARTED})
# Causes in which the client sent another prompt than before.
BY_CLIENT: Final = frozenset(
    {
        Cause.SYSTEM_PROMPT_CHANGED,
        Cause.TOOLS_CHANGED,
        Cause.HISTORY_TRUNCATED,
        Cause.MESSAGE_CHANGED,
    }
)
# Causes in which the lost tokens might be in a slot file.
OF_PLACE: Final = frozenset(
    {
        Cause.OTHER_INSTANCE,
        Cause.SLOT_EVICTED,
        Cause.SLOT_BUSY,
        Cause.MODEL_UNLOADED,
        Cause.ENGINE_RESTARTED,
        Cause.NOT_FOUND,
    }
)


# A client's change: a value of this kind, several lines that describe its environment, other text,
# the order of its tools, or the tools.
ChangeKind = Literal[
    "header", "uuid", "time", "date", "path", "number", "block", "text", "order", "tools"
]
# With the first character in the text of the message, and the one after the last; for tools 0, and
# how many there are.
Change = tuple[ChangeKind, int, int]


class CacheFinding(NamedTuple):
    """The tokens of a prompt that were found in the cache, and why not more. Contains no text.

    Its fields are members of the JSON API.
    """

    cause: Cause
    tokens: int
    found: int
    reusable: int  # Tokens that the caches would have had if nothing had been changed or lost.
    # Tokens equal to the earlier prompt from the start; None without one, or if all are equal.
    shared: int | None = None
    token: int | None = None  # The first token that differs, from 1; None if none does.
    is_about: bool = False  # Whether positions are estimated from the sizes of texts.
    message: int | None = None  # Index of the message that differs, from 0.
    role: str | None = None
    dropped: int = 0
    repeated: int = 1  # Number of successive requests of the client with the same cause.
    earlier: str | None = None  # Id of the earlier request that it is compared with.
    earlier_instance: str | None = None
    age_s: float | None = None
    is_continued: bool = False  # See `CacheFacts`, as for `is_awaited`, `tier` and `restore_ms`.
    is_awaited: bool = False
    tier: Tier | None = None
    restore_ms: float | None = None
    saved_ms: float | None = None  # Estimated time to compute `found`, minus `restore_ms`.
    # Why the lost tokens were in no slot file either; None if unknown.
    no_file: NoFile | None = None
    # Tokens that earlier requests of the same API key can have left in caches, if fewer than
    # `found` or `reusable`.
    own: int | None = None
    # For how long the request waited for another one, which computed the beginning of both.
    beginning_wait_ms: float | None = None
    # For how long its slot was held for it while others waited, and for how long it waited itself
    # although slots were free, which were held for others.
    held_ms: float | None = None
    hold_wait_ms: float | None = None
    ahead: int = 0  # Tokens of `found` that were computed before the request came.
    # The client's changes in the message, or in the tools; empty if they are unknown.
    changes: Sequence[Change] = ()

    @property
    def lost(self) -> int:
        """Tokens recomputed although the caches could have had them; 0 if few."""
        return 0 if self.cause in PLAIN else max(0, self.reusable - self.found)

    def repeating(self, repeated: int) -> CacheFinding:
        return self if repeated == self.repeated else self._replace(repeated=repeated)

    def without_file(self, no_file: NoFile | None) -> CacheFinding:
        return self._replace(no_file=no_file)

    def as_fields(self) -> dict[str, Any]:
        """Return JSON members, without those that have their default."""
        usual = self._field_defaults
        figures = zip(self._fields, self, strict=True)
        return {name: value for name, value in figures if name not in usual or value != usual[name]}


def cache_finding(written: Mapping[str, Any]) -> CacheFinding:
    """Parse `as_fields`; raise ValueError, KeyError or TypeError if it is invalid."""
    kept = {name: value for name, value in written.items() if name in CacheFinding._fields}
    return CacheFinding(**{**kept, "cause": Cause(kept["cause"])})
