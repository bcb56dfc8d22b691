"""What nodes of every kind say of their models."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.nodes.model_list import RemoteModel, Unreadable, count_slots, read_remote_models


def page(*entries: Any) -> bytes:
    return json.dumps({"object": "list", "data": entries}).encode()


def test_client_corral_says_names_slots_and_context() -> None:
    entry = {
        "id": "chat",
        "aliases": ["talk", "chat"],
        "context_length": 4096,
        "meta": {"n_ctx": 4096, "slots": 6},
        "status": {"value": "loaded", "failed": False, "reason": None},
    }
    assert read_remote_models(page(entry)) == (RemoteModel("chat", ("talk",), 6, 4096),)


def test_client_server_says_little_and_others_less() -> None:
    client_server = {"id": "a.gguf", "meta": {"n_ctx_train": 8192, "n_ctx": 2048}, "created": 1}
    assert read_remote_models(page(client_server)) == (RemoteModel("a.gguf", context_length=2048),)
    assert read_remote_models(page({"id": "a"})) == (RemoteModel("a"),)


@pytest.mark.parametrize("value", ["unloaded", "loading", "sleeping", None, 7])
def test_a_model_that_says_it_is_not_loaded_is_left_alone(value: object) -> None:
    assert read_remote_models(page({"id": "a", "status": {"value": value}})) == ()


@pytest.mark.parametrize("entry", [7, None, {}, {"id": 7}, {"id": ""}, {"id": "a\n"}])
def test_what_is_no_model_is_passed_over(entry: object) -> None:
    assert read_remote_models(page(entry, {"id": "b"})) == (RemoteModel("b"),)


@pytest.mark.parametrize(
    "strange",
    [
        {"meta": 7},
        {"meta": {"slots": "four"}},
        {"meta": {"slots": -1}},
        {"meta": {"slots": True}},
        {"aliases": "talk"},
        {"aliases": [7, "", None]},
        {"context_length": 2.5},
    ],
)
def test_a_member_that_makes_no_sense_says_nothing(strange: dict[str, Any]) -> None:
    assert read_remote_models(page({"id": "a", **strange})) == (RemoteModel("a"),)


def test_no_node_has_slots_without_end() -> None:
    assert read_remote_models(page({"id": "a", "meta": {"slots": 10**9}}))[0].slots == 1024


def test_a_model_listed_twice_is_one() -> None:
    assert len(read_remote_models(page({"id": "a"}, {"id": "a"}))) == 1


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"7", b'{"data": {}}', b"<html>"])
def test_what_is_no_list_of_models_is_said_to_be_none(body: bytes) -> None:
    with pytest.raises(Unreadable, match="list of models"):
        read_remote_models(body)


def test_a_list_without_end_is_not_read() -> None:
    with pytest.raises(Unreadable, match="more than 1024"):
        read_remote_models(page(*({"id": str(number)} for number in range(1025))))


@pytest.mark.parametrize(
    ("body", "slots"), [(b'[{"id":0},{"id":1}]', 2), (b"[]", None), (b"{}", None), (b"x", None)]
)
def test_slots_are_counted_where_they_are_listed(body: bytes, slots: int | None) -> None:
    assert count_slots(body) == slots
