"""What was found of a prompt in the caches, and the words for why not more: tiers, causes.

`cache.miss_cause` decides which cause it is; `explanation` puts it into sentences.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final, NamedTuple


class Tier(StrEnum):
    SLOT = "slot"
    """In the slot that the request got."""
    HOST_CACHE = "host_cache"
    """In no such slot: in what the engine keeps in main memory (`cache-ram`)."""
    DISK = "disk"
    """In a slot file, restored for the request or as the process began."""
    NONE = "none"


class NoFile(StrEnum):
    OFF = "off"
    """Its instance neither saves nor restores any."""
    COST = "cost"
    """Saving it did not pay when its slot was taken."""
    LIMIT = "limit"
    """The limits of the disk, or of writes in an hour, were reached."""
    DELETED = "deleted"
    """There was one: its age or the budget deleted it, or it could not be read."""
    OTHER_BUILD = "other_build"
    """There is one, of another build or other options."""
    FAILED = "failed"
    """There was one, and its restore failed."""


# A shorter prompt is computed within a batch: nothing of it is remembered or compared.
TOKENS_MIN: Final = 64


class Cause(StrEnum):
    # Of what was found in the cache:
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
    # Of an error:
    ERROR = "error"
    # Of the time:
    QUEUE = "queue"
    LOADING = "loading"
    SLOW_CLIENT = "slow_client"


PLAIN: Final = frozenset({Cause.ALL_FOUND, Cause.FIRST_REQUEST, Cause.SHORT_PROMPT})
# The model had to be loaded for these, too.
WITH_LOAD: Final = frozenset({Cause.MODEL_UNLOADED, Cause.ENGINE_RESTARTED})
# The client sent another prompt than before.
BY_CLIENT: Final = frozenset(
    {
        Cause.SYSTEM_PROMPT_CHANGED,
        Cause.TOOLS_CHANGED,
        Cause.HISTORY_TRUNCATED,
        Cause.MESSAGE_CHANGED,
    }
)
# What was lost might be in a slot file.
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


class CacheFinding(NamedTuple):
    """What was found of a prompt in the cache, and why not more. Figures only.

    Attributes:
        tokens: Of the prompt.
        found: In the cache.
        reusable: That the caches would have held, had nothing been changed or lost.
        shared: Equal from the start to the earlier prompt; None without one, or where all was.
        token: The first that differs, from 1; None where none does.
        is_about: It is estimated from the sizes of texts.
        message: The client's number of the message that differs, from 0.
        role: Of what differs.
        dropped: Messages that the client left out.
        repeated: In how many requests of the client, one after the other, it was the same cause.
        earlier: The id of the request that is compared.
        earlier_instance: The one that computed it.
        age_s: Since it ended.
        is_continued: As of `CacheFacts`, as are `is_awaited`, `tier` and `restore_ms`.
        no_file: Why what was lost was in no slot file either; None where that is not known.
        own: What earlier requests of the same key can have left in caches, where that is less than
            was found or could be.
    """

    cause: Cause
    tokens: int
    found: int
    reusable: int
    shared: int | None = None
    token: int | None = None
    is_about: bool = False
    message: int | None = None
    role: str | None = None
    dropped: int = 0
    repeated: int = 1
    earlier: str | None = None
    earlier_instance: str | None = None
    age_s: float | None = None
    is_continued: bool = False
    is_awaited: bool = False
    tier: Tier | None = None
    restore_ms: float | None = None
    no_file: NoFile | None = None
    own: int | None = None

    @property
    def lost(self) -> int:
        """Tokens that were computed although the caches could have held them; 0 if few."""
        return 0 if self.cause in PLAIN else max(0, self.reusable - self.found)

    def repeating(self, repeated: int) -> CacheFinding:
        """Return it with how often its cause came."""
        return self if repeated == self.repeated else self._replace(repeated=repeated)

    def without_file(self, no_file: NoFile | None) -> CacheFinding:
        return self._replace(no_file=no_file)

    def as_fields(self) -> dict[str, Any]:
        """As JSON, without what says nothing."""
        usual = self._field_defaults
        figures = zip(self._fields, self, strict=True)
        return {name: value for name, value in figures if name not in usual or value != usual[name]}


def cache_finding(written: Mapping[str, Any]) -> CacheFinding:
    """Read `as_fields`; raises ValueError, KeyError or TypeError."""
    kept = {name: value for name, value in written.items() if name in CacheFinding._fields}
    return CacheFinding(**{**kept, "cause": Cause(kept["cause"])})
