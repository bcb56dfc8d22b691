"""The name that a client gives a conversation, wherever its program puts it. Pure.

Of several the first in the order below counts, the most exact. `x-client-request-id` is none: some
clients make a new one for each request. Source: Claude Code, opencode, Codex, Amp and
llama-server's web page, as they send it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

_HEADERS_FIRST: Final = (
    "x-claude-code-session-id",
    "x-opencode-session",
    "x-session-affinity",
    "x-session-id",
    "session_id",
    "conversation_id",
)
_HEADERS_LAST: Final = ("x-amp-thread-id", "x-conversation-id")
# Claude Code writes user_…_account_…_session_UUID, later versions an object as a string.
_IN_USER_ID: Final = re.compile(r'_session_([\w-]{8,64})|"session_id"\s*:\s*"([\w-]{8,64})"')
_NAME_MAX_CHARACTERS: Final = 512
_USER_MAX_CHARACTERS: Final = 4096


def session_id(headers: Mapping[str, str], members: Mapping[str, Any]) -> str | None:
    """Return the client's name for the conversation, 1 to 512 characters, or None."""
    given = (
        *map(headers.get, _HEADERS_FIRST),
        members.get("prompt_cache_key"),
        *map(headers.get, _HEADERS_LAST),
        _in_metadata(members.get("metadata")),
    )
    for value in filter(None, given):
        if isinstance(value, str) and (name := value[:_USER_MAX_CHARACTERS].strip()):
            return name[:_NAME_MAX_CHARACTERS]
    return None


def _in_metadata(metadata: object) -> str | None:
    user = metadata.get("user_id") if isinstance(metadata, dict) else None
    found = _IN_USER_ID.search(user[:_USER_MAX_CHARACTERS]) if isinstance(user, str) else None
    return found[1] or found[2] if found else None
