"""Where clients put the name of a conversation."""

from typing import Any

import pytest
from multidict import CIMultiDict

from proxy.request.request import session_id


@pytest.mark.parametrize(
    "name",
    [
        "X-Claude-Code-Session-Id",
        "x-opencode-session",
        "X-Session-Affinity",
        "x-session-id",
        "session_id",
        "conversation_id",
        "X-Amp-Thread-Id",
        "X-Conversation-Id",
    ],
)
def test_a_header_names_it(name: str) -> None:
    assert session_id(CIMultiDict({name: " s-1 "}), {}) == "s-1"


@pytest.mark.parametrize(
    "members",
    [
        {"prompt_cache_key": "s-000001"},
        {"metadata": {"user_id": "user_9f_account__session_s-000001"}},
        {"metadata": {"user_id": '{"device":"x","session_id":"s-000001"}'}},
    ],
)
def test_a_body_names_it(members: dict[str, Any]) -> None:
    assert session_id(CIMultiDict(), members) == "s-000001"


def test_the_more_exact_name_counts() -> None:
    members = {"prompt_cache_key": "key", "metadata": {"user_id": "user_1_session_12345678"}}
    assert session_id(CIMultiDict({"X-Conversation-Id": "talk"}), members) == "key"
    assert session_id(CIMultiDict({"session_id": "codex"}), members) == "codex"


@pytest.mark.parametrize(
    "members", [{}, {"prompt_cache_key": 7}, {"metadata": "x"}, {"metadata": {"user_id": "me"}}]
)
def test_no_name_is_none(members: dict[str, Any]) -> None:
    assert session_id(CIMultiDict({"X-Client-Request-Id": "r", "session_id": " "}), members) is None
