"""The causes that an explanation names."""

from __future__ import annotations

from enum import StrEnum
from typing import Final

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
