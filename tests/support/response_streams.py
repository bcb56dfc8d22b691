"""Streams of responses as the engine (build 10434) writes them."""

from __future__ import annotations

import json
from typing import Any

USAGE = {"input_tokens": 9, "output_tokens": 7, "total_tokens": 16}


def written(**event: Any) -> bytes:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode()


def opened(**members: Any) -> list[bytes]:
    response = {"id": "resp_1", "object": "response", "status": "in_progress", **members}
    return [
        written(type=f"response.{name}", response=response) for name in ("created", "in_progress")
    ]


def closed(*output: dict[str, Any], tokens: int = 7) -> bytes:
    usage = {**USAGE, "output_tokens": tokens}
    response = {"id": "resp_1", "object": "response", "created_at": 9, "status": "completed"}
    whole = {**response, "model": "chat", "output": output, "usage": usage}
    return written(type="response.completed", response=whole)


def added(**item: Any) -> bytes:
    return written(type="response.output_item.added", item={**item, "status": "in_progress"})


def done(**item: Any) -> bytes:
    return written(type="response.output_item.done", item=item)


def text_item(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "annotations": [], "logprobs": [], "text": text}
    own = {"type": "message", "status": "completed", "id": "msg_1", "role": "assistant"}
    return {**own, "content": [part]}


def call_item(name: str, city: str) -> dict[str, Any]:
    arguments = json.dumps({"city": city})
    own = {"type": "function_call", "status": "completed", "arguments": arguments}
    return {**own, "call_id": f"fc_{name}", "name": "weather"}


def thought_item(text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    own = {"id": "rs_1", "summary": [], "type": "reasoning", "encrypted_content": ""}
    return {**own, "content": content}


def text_events(*deltas: str, whole: str | None = None) -> list[bytes]:
    text = "".join(deltas) if whole is None else whole
    item = text_item(text)
    part = {"type": "output_text", "text": ""}
    delta = "response.output_text.delta"
    return [
        added(content=[], id="msg_1", role="assistant", type="message"),
        written(type="response.content_part.added", item_id="msg_1", part=part),
        *[written(type=delta, item_id="msg_1", delta=piece) for piece in deltas],
        *text_end(item),
    ]


def text_end(item: dict[str, Any]) -> list[bytes]:
    (part,) = item["content"]
    return [
        written(type="response.output_text.done", item_id="msg_1", text=part["text"]),
        written(type="response.content_part.done", item_id="msg_1", part=part),
        done(**item),
    ]


def call_events(item: dict[str, Any], *deltas: str) -> list[bytes]:
    delta = "response.function_call_arguments.delta"
    return [
        added(arguments="", call_id=item["call_id"], name=item["name"], type="function_call"),
        *[written(type=delta, item_id=item["call_id"], delta=piece) for piece in deltas],
    ]


ROME, OSLO = call_item("a", "Rome"), call_item("b", "Oslo")
THOUGHT = thought_item("hm, so")
STREAMS: dict[str, list[bytes]] = {
    "text": [*opened(), *text_events("Hel", "lo"), closed(text_item("Hello"))],
    "the end held back": [
        *opened(),
        *text_events("Hel", whole="Hello <"),
        closed(text_item("Hello <")),
    ],
    "all held back": [*opened(), *text_end(text_item("<")), closed(text_item("<"))],
    "no beginning": [*text_events("🦙"), closed(text_item("🦙"))],
    "calls": [
        *opened(),
        *call_events(ROME, '{"city": "', 'Rome"}'),
        *call_events(OSLO, '{"city": "Os'),
        done(**ROME),
        done(**OSLO),
        closed(ROME, OSLO),
    ],
    "calls of one name": [
        *opened(),
        *call_events(ROME, ROME["arguments"]),
        *call_events({**OSLO, "call_id": ROME["call_id"]}, OSLO["arguments"]),
        done(**ROME),
        done(**{**OSLO, "call_id": ROME["call_id"]}),
        closed(ROME, {**OSLO, "call_id": ROME["call_id"]}),
    ],
    "thought": [
        *opened(),
        added(id="rs_1", summary=[], type="reasoning", content=[], encrypted_content=""),
        written(type="response.reasoning_text.delta", item_id="rs_1", delta="hm, "),
        *text_events("Hello")[:3],
        done(**THOUGHT),
        *text_end(text_item("Hello")),
        closed(THOUGHT, text_item("Hello")),
    ],
    "thought held back": [*opened(), done(**THOUGHT), closed(THOUGHT)],
    "nothing": [*opened(), closed()],
}
