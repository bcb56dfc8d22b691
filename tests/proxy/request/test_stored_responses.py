"""Stored responses: whose they are, and how many there can be."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.cache.prompt import read_prompt
from proxy.errors import BadRequest, LimitExceeded, PreviousResponseNotFound
from proxy.forward.assemblers import reader_for
from proxy.request.stored_responses import ResponseStore, StoredTurn
from proxy.settings import StoredResponseSettings
from proxy.upstream.endpoint_kinds import EndpointKind

MEBIBYTE = 1024**2


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def store_of(clock: Clock | None = None, *, enabled: bool = True, **limits: int) -> ResponseStore:
    settings = StoredResponseSettings(enabled=enabled, **limits)
    return ResponseStore(settings, clock or Clock())


def said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answered(number: int, text: str = "a") -> dict[str, Any]:
    part = {"type": "output_text", "text": text}
    item = {"type": "message", "id": f"msg_{number}", "role": "assistant", "content": [part]}
    return {"id": f"resp_{number}", "object": "response", "output": [item]}


def turn_of(store: ResponseStore, owner: str = "me", max_bytes: int = MEBIBYTE) -> StoredTurn:
    return StoredTurn(store, owner, max_bytes)


def ask(store: ResponseStore, number: int, owner: str = "me", /, **members: Any) -> dict[str, Any]:
    """Send a request; return the body that the engine gets."""
    turn = turn_of(store, owner)
    asked = turn.members({"input": f"q{number}", **members})
    turn.add(answered(number))
    return asked


def texts(members: dict[str, Any]) -> list[str]:
    found = [item["content"] for item in members["input"]]
    return [entry if isinstance(entry, str) else entry[0]["text"] for entry in found]


def test_a_request_continues_the_conversation() -> None:
    store = store_of()
    first = {"input": "q1", "instructions": "Be short."}
    assert turn_of(store).members(first) is first
    ask(store, 1, instructions="Be short.")
    ask(store, 2, previous_response_id="resp_1")
    third = ask(store, 3, previous_response_id="resp_2")
    assert texts(third) == ["q1", "a", "q2", "a", "q3"]
    assert third.keys() == {"input"}


def test_a_conversation_forks() -> None:
    store = store_of()
    ask(store, 1)
    for number in (2, 3):
        found = ask(store, number, previous_response_id="resp_1")
        assert texts(found) == ["q1", "a", f"q{number}"]


def test_a_response_belongs_to_its_owner() -> None:
    store = store_of()
    ask(store, 1)
    assert store.find("you", "resp_1") is None
    with pytest.raises(PreviousResponseNotFound, match=r"'resp_1' not found") as failure:
        ask(store, 2, "you", previous_response_id="resp_1")
    assert failure.value.param == "previous_response_id"
    assert not store.delete("you", "resp_1")
    assert store.delete("me", "resp_1")
    assert store.find("me", "resp_1") is None


def test_what_is_referred_to_is_found_in_requests_and_responses() -> None:
    """As the AI SDK sends a conversation."""
    store = store_of()
    reference = {"type": "item_reference", "id": "msg_1"}
    ask(store, 1)
    second = ask(store, 2, input=[said("q1"), reference, said("q2")])
    assert texts(second) == ["q1", "a", "q2"]
    store.delete("me", "resp_1")
    assert texts(ask(store, 3, input=[reference])) == ["a"]
    with pytest.raises(BadRequest, match=r"Item with id 'msg_9' not found"):
        ask(store, 4, input=[{"type": "item_reference", "id": "msg_9"}])
    with pytest.raises(BadRequest, match="not found"):
        ask(store, 4, "you", input=[reference])


def test_nothing_is_stored_unless_it_is_enabled() -> None:
    store = store_of()
    ask(store, 1, store=False)
    assert len(store) == 0
    store = store_of(enabled=False)
    ask(store, 1)
    assert len(store) == 0
    for members in (
        {"previous_response_id": "resp_1"},
        {"input": [{"type": "item_reference", "id": "msg_1"}]},
    ):
        with pytest.raises(BadRequest, match=r"\[proxy\.stored_responses\]"):
            ask(store, 2, **members)


def test_the_oldest_go_first() -> None:
    store = store_of(max_count=2)
    for number in (1, 2, 3):
        ask(store, number)
    assert [bool(store.find("me", f"resp_{number}")) for number in (1, 2, 3)] == [False, True, True]


def test_a_turn_stays_while_a_later_one_needs_it() -> None:
    store = store_of(max_count=2)
    ask(store, 1)
    for number in (2, 3, 4):
        ask(store, number, previous_response_id=f"resp_{number - 1}")
    assert len(store) == 2
    assert len(texts(ask(store, 5, previous_response_id="resp_4"))) == 9
    for number in (4, 5):
        store.delete("me", f"resp_{number}")
    assert store.held_bytes == 0


def has_item(store: ResponseStore, item: str) -> bool:
    """Return whether a request may refer to an item of a stored response."""
    try:
        turn_of(store).members({"input": [{"type": "item_reference", "id": item}]})
    except BadRequest:
        return False
    return True


def test_memory_is_bounded() -> None:
    store = store_of(max_bytes=MEBIBYTE)
    for number in range(100):
        turn = turn_of(store)
        turn.members({"input": "x" * 100_000})
        turn.add(answered(number))
        assert store.held_bytes <= MEBIBYTE
    assert 0 < len(store) < 12
    found = [number for number in range(100) if has_item(store, f"msg_{number}")]
    assert len(found) == len(store)
    ask(store, 100, input="y" * 2 * MEBIBYTE)
    assert (len(store), store.held_bytes) == (0, 0)
    assert not any(has_item(store, f"msg_{number}") for number in range(100))


def test_a_response_is_kept_for_its_time() -> None:
    clock = Clock()
    store = store_of(clock, keep_s=60)
    ask(store, 1)
    clock.now_s = 60
    assert store.find("me", "resp_1")
    clock.now_s = 61
    assert store.find("me", "resp_1") is None
    assert store.item("me", "msg_1") is None
    store.trim()
    assert (len(store), store.held_bytes) == (0, 0)


def test_a_conversation_is_as_long_as_a_body_may_be() -> None:
    store = store_of()
    ask(store, 1, input="x" * 5000)
    with pytest.raises(LimitExceeded, match="max_body_bytes"):
        turn_of(store, max_bytes=5000).members({"input": "on", "previous_response_id": "resp_1"})


@pytest.mark.parametrize("given", [3, None, {}])
def test_what_is_no_input_is_the_engines_to_refuse(given: object) -> None:
    members = {"input": given}
    turn = turn_of(store_of())
    assert turn.members(members) is members
    turn.add(answered(1))


def test_a_request_that_may_grow_is_read_as_a_long_one() -> None:
    turn = turn_of(store_of(), max_bytes=1000)
    assert turn.size_bytes(b'{"input": "a"}') == 14
    assert turn.size_bytes(b'{"previous_response_id":"a"}') == 1000
    assert turn.size_bytes(b'{"input":[{"type":"item_reference"}]}') == 1000


def test_a_conversation_object_is_refused() -> None:
    """Ignored, it would be a conversation that forgets."""
    with pytest.raises(BadRequest, match="previous_response_id"):
        ask(store_of(), 1, conversation="conv_1")


def test_the_router_recognises_the_next_turn() -> None:
    """By the same hashes as those of a client that repeats the conversation."""
    store = store_of()
    first = read_prompt(EndpointKind.RESPONSES, "chat", ask(store, 1))
    reader = reader_for(EndpointKind.RESPONSES)
    reader.take({**answered(1), "usage": {"input_tokens": 1, "output_tokens": 1}})
    second = read_prompt(
        EndpointKind.RESPONSES, "chat", ask(store, 2, previous_response_id="resp_1")
    )
    reply = reader.message()
    assert first
    assert second
    assert reply
    assert first.hash_with_reply(reply) in second.turn_hashes


def test_an_id_must_be_a_string() -> None:
    with pytest.raises(BadRequest, match="must be a string"):
        ask(store_of(), 1, previous_response_id=3)
    assert json.dumps(ask(store_of(), 1, previous_response_id=None))
