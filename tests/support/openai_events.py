"""Events and responses, checked by OpenAI's own types: a missing member fails."""

import json
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def parsed(stream: bytes) -> list[dict[str, Any]]:
    """Return the events of a stream, each of which must be named as its type says."""
    found = []
    for text in stream.decode().split("\n\n"):
        if text.startswith("event: "):
            name, data = text.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert event["type"] == name.removeprefix("event: ")
            found.append(event)
    return found


def check_stream(events: list[dict[str, Any]]) -> None:
    """Check each event, their numbers, and that the deltas add up to the items."""
    for event in events:
        _EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    added: dict[int, Any] = {}
    for event in events:
        check_event(event, added)
    last = events[-1]["response"]
    assert [item["id"] for item in last["output"]] == [added[at]["id"] for at in sorted(added)]
    assert [text_of(item) for item in last["output"]] == [added[at]["text"] for at in sorted(added)]


def check_event(event: dict[str, Any], added: dict[int, Any]) -> None:
    index = event.get("output_index")
    if event["type"] == "response.output_item.added":
        assert index == len(added)
        added[index] = {"id": event["item"]["id"], "text": ""}
    elif event["type"].endswith(".delta"):
        assert event["item_id"] == added[event["output_index"]]["id"]
        added[event["output_index"]]["text"] += event["delta"]
    elif event["type"] == "response.output_item.done":
        assert event["item"]["id"] == added[event["output_index"]]["id"]


def check_response(response: dict[str, Any]) -> None:
    Response.model_validate(response)


def text_of(item: dict[str, Any]) -> str:
    if item["type"] == "function_call":
        return str(item["arguments"])
    return "".join(part["text"] for part in item["content"])
