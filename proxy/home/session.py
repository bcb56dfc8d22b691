"""The name that a client gives a conversation, wherever its program puts it. Pure.

Of several the first in the order below counts: the more exact a name, the earlier. A request id
(`x-client-request-id`) is no such name: some clients make a new one for each request.

Source: Claude Code, opencode, Codex, Amp and llama-server's web page, as they send it.
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


def session_of(headers: Mapping[str, str], members: Mapping[str, Any]) -> str | None:
    """Return the client's name for the conversation, 1 to 512 characters, or None.

    Args:
        headers: The client's header fields, to be asked in any case.
        members: What the body says.
    """
    said = (
        *(headers.get(name) for name in _HEADERS_FIRST),
        members.get("prompt_cache_key"),
        *(headers.get(name) for name in _HEADERS_LAST),
        _in_metadata(members.get("metadata")),
    )
    names = (name for name in said if isinstance(name, str) and name.strip())
    return next((name.strip()[:_NAME_MAX_CHARACTERS] for name in names), None)


def _in_metadata(metadata: object) -> str | None:
    user = metadata.get("user_id") if isinstance(metadata, Mapping) else None
    found = _IN_USER_ID.search(user) if isinstance(user, str) else None
    return found[1] or found[2] if found else None
