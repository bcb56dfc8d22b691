"""No key gets into a capture; the text of a prompt does."""

from __future__ import annotations

from multidict import CIMultiDict

from supervisor.experiments.capture_lines import keep_headers, redact_keys, redact_query


def test_only_headers_that_hold_no_key_are_kept() -> None:
    given = {
        "Authorization": "Bearer sk-1",
        "X-Api-Key": "sk-2",
        "Cookie": "sk-3",
        "X-Anything-Else": "sk-4",
        "User-Agent": "curl",
    }
    assert keep_headers(CIMultiDict(given)) == {"User-Agent": "curl"}


def test_values_of_unknown_query_parameters_are_replaced() -> None:
    assert redact_query("model=chat&api_key=sk-1&x=2") == (
        "model=chat&api_key=%5Bredacted%5D&x=%5Bredacted%5D"
    )


def test_texts_under_the_names_of_keys_are_replaced_wherever_they_are() -> None:
    tool = {"type": "mcp", "headers": {"X-Mine": "sk-2"}, "authorization": "sk-3"}
    schema = {"properties": {"password": {"type": "string"}}}
    body = {"messages": [{"content": "my password"}], "api-key": "sk-1", "tools": [tool, schema]}
    kept = redact_keys(body)
    assert "sk-" not in str(kept)
    assert kept["messages"] == body["messages"]
    assert kept["tools"][1] == schema
