"""The models of nodes: read from their responses, and merged with the local ones."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest
from support.proxy_harness import model_info

from proxy.nodes import model_list
from proxy.nodes.model_list import (
    OfferedModel,
    RemoteModel,
    Unreadable,
    count_slots,
    read_remote_models,
    remote_models,
    served_id,
)
from proxy.request.models import ModelInfo, ModelNames, with_variants, without_nodes
from proxy.request.variants import Adapter, Variant

CHAT = model_info("chat", "unloaded")


def offered(
    name: str, *aliases: str, node: str = "far", problem: str | None = None
) -> OfferedModel:
    return OfferedModel(RemoteModel(name, aliases, context_length=1024), 3, node, problem)


def merged(
    local: list[ModelInfo],
    offers: list[OfferedModel],
    created: int,
    fallback: dict[str, list[str]] | None = None,
    on_demand: Collection[str] = (),
) -> list[ModelInfo]:
    remote = remote_models(ModelNames(local), offers, created, fallback or {}, on_demand)
    return model_list.merge_models(local, remote)


def page(*entries: Any) -> bytes:
    return json.dumps({"object": "list", "data": entries}).encode()


def test_llama_corral_reports_names_slots_and_context() -> None:
    entry = {
        "id": "chat",
        "aliases": ["talk", "chat"],
        "context_length": 4096,
        "meta": {"n_ctx": 4096, "slots": 6},
        "status": {"value": "loaded", "failed": False, "reason": None},
    }
    assert read_remote_models(page(entry)) == (RemoteModel("chat", ("talk",), 6, 4096),)


def test_llama_server_and_others_report_less() -> None:
    meta: dict[str, int | str] = {"n_ctx_train": 8192, "ftype": "F16"}
    more = {"n_ctx": 2048, "n_params": "many", "size": -1, "template": "x"}
    llama_server = {"id": "a.gguf", "meta": {**meta, **more}, "created": 1}
    assert read_remote_models(page(llama_server)) == (
        RemoteModel("a.gguf", context_length=2048, meta=meta),
    )
    assert read_remote_models(page({"id": "a"})) == (RemoteModel("a"),)


@pytest.mark.parametrize("value", ["unloaded", "loading", "sleeping", None, 7])
def test_a_model_that_is_not_loaded_is_ignored(value: object) -> None:
    assert read_remote_models(page({"id": "a", "status": {"value": value}})) == ()


@pytest.mark.parametrize("entry", [7, None, {}, {"id": 7}, {"id": ""}, {"id": "a\n"}])
def test_an_entry_that_is_not_a_model_is_ignored(entry: object) -> None:
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
def test_an_invalid_member_is_ignored(strange: dict[str, Any]) -> None:
    assert read_remote_models(page({"id": "a", **strange})) == (RemoteModel("a"),)


def test_slots_are_capped() -> None:
    assert read_remote_models(page({"id": "a", "meta": {"slots": 10**9}}))[0].slots == 1024


def test_a_model_listed_twice_counts_once() -> None:
    assert len(read_remote_models(page({"id": "a"}, {"id": "a"}))) == 1


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"7", b'{"data": {}}', b"<html>"])
def test_a_response_that_is_not_a_list_of_models_is_unreadable(body: bytes) -> None:
    with pytest.raises(Unreadable, match="list of models"):
        read_remote_models(body)


def test_more_models_or_names_than_a_machine_has_are_refused_unless_some_are_chosen() -> None:
    many = page(*({"id": str(number)} for number in range(513)))
    with pytest.raises(Unreadable, match="more than 512 models; choose some with `models`"):
        read_remote_models(many)
    assert len(read_remote_models(many, ["7", "8"])) == 2
    aliases = [f"alias {number}" for number in range(300)]
    named = page(*({"id": str(number), "aliases": aliases} for number in range(7)))
    with pytest.raises(Unreadable, match="more than 2048 names"):
        read_remote_models(named)
    high = [{"id": f"a:{number}", "variant_of": "a"} for number in range(200)]
    with pytest.raises(Unreadable, match="more than 2048 names"):
        read_remote_models(page({"id": "a", "aliases": aliases[:20]}, *high))


@pytest.mark.parametrize(
    ("body", "slots"), [(b'[{"id":0},{"id":1}]', 2), (b"[]", None), (b"{}", None), (b"x", None)]
)
def test_count_slots(body: bytes, slots: int | None) -> None:
    assert count_slots(body) == slots


def test_a_local_model_that_a_node_offers_is_one_model() -> None:
    (both,) = merged([CHAT], [offered("chat")], 1)
    assert (both.id, both.state, both.slots) == ("chat", "loaded", CHAT.slots + 3)
    assert merged([CHAT], [offered("chat", problem="away")], 1) == [CHAT]


def test_a_node_can_have_another_name_for_a_local_model() -> None:
    assert served_id(RemoteModel("Chat-7B.gguf", ("chat",)), ModelNames([CHAT])) == "chat"
    assert served_id(RemoteModel("vendor/chat"), ModelNames([CHAT])) == "chat"
    assert served_id(RemoteModel("other"), ModelNames([CHAT])) == "other"


def test_a_nodes_variant_of_a_local_model_is_ignored() -> None:
    ours = replace(CHAT, variants={"high": Variant(temperature=1)})
    assert served_id(RemoteModel("chat:high"), ModelNames([ours])) is None
    assert merged([ours], [offered("chat:high")], 1) == [ours]


def test_a_nodes_variants_are_no_separate_models() -> None:
    high = {"id": "far:high", "variant_of": "far"}
    found = read_remote_models(page({"id": "far"}, high, {"id": "lone:x", "variant_of": "lone"}))
    assert [(entry.id, entry.variants) for entry in found] == [("far", ("high",)), ("lone:x", ())]
    for odd in (["far"], "other", 1, None):
        both = read_remote_models(page({"id": "far"}, {**high, "variant_of": odd}))
        assert [entry.id for entry in both] == ["far", "far:high"]
    assert [model.id for model in read_remote_models(page({"id": "far"}, high), ["far:high"])] == [
        "far:high"
    ]


def test_a_variant_that_only_a_node_has_keeps_its_name() -> None:
    far = OfferedModel(RemoteModel("far", variants=("high",)), 3, "box")
    ours = OfferedModel(RemoteModel("chat", variants=("high", "low")), 3, "box")
    here = replace(CHAT, variants={"high": Variant(temperature=1)})
    model_infos = merged([here], [far, ours], 1)
    names = ModelNames(model_infos)
    assert names.resolve("far:high").remote_variant == "high"
    assert names.resolve("chat:low").remote_variant == "low"
    assert names.resolve("chat:high").variant
    assert [variant.id for variant in with_variants(model_infos)] == [
        *("chat", "chat:high", "chat:low"),
        *("far", "far:high"),
    ]
    assert names.local.get("chat:low") is None


def test_a_remote_only_model_is_failed_while_no_node_is_up() -> None:
    away = offered("far", "f", problem="is away")
    (_, found) = merged([CHAT], [away], 1)
    assert (found.state, found.reason, found.slots) == ("failed", "far: is away", 0)
    assert found.aliases == ("f",)
    (_, found) = merged([CHAT], [away, offered("far", node="near")], 1)
    assert (found.state, found.reason, found.slots) == ("loaded", None, 3)


def test_a_nodes_model_has_the_fallback_of_the_settings_by_any_of_its_names() -> None:
    (_, far) = merged([CHAT], [offered("far", "f")], 1, {"f": ["chat"]})
    assert far.fallback == ("chat",)
    (_, far, gone) = merged([CHAT], [offered("far", problem="away")], 1, {"far": [], "x": ["chat"]})
    assert (far.state, gone.id, gone.state, gone.reason) == (
        "failed",
        "x",
        "failed",
        "no node has it",
    )
    assert gone.fallback == ("chat",)
    assert without_nodes([CHAT, far, gone]) == [CHAT]


def test_a_model_whose_machines_are_started_on_demand_is_unloaded_while_there_are_none() -> None:
    names = ["far", "chat"]
    (_, far) = merged([CHAT], [], 1, {"far": ["chat"]}, names)  # the local one is as it is
    assert (far.id, far.state, far.reason, far.fallback) == ("far", "unloaded", None, ("chat",))
    (_, far) = merged([CHAT], [offered("far", problem="is away")], 1, on_demand=names)
    assert (far.state, far.reason, far.slots) == ("unloaded", None, 0)
    (_, far) = merged([CHAT], [offered("far")], 1, on_demand=names)
    assert (far.state, far.slots) == ("loaded", 3)


def test_other_proxies_get_only_local_models() -> None:
    model_infos = merged([CHAT], [offered("chat"), offered("far")], 1)
    assert without_nodes(model_infos) == [CHAT]


def test_adapters_of_nodes_are_variants_with_their_mark() -> None:
    legal = {"id": "far+legal", "variant_of": "far"}
    (far,) = read_remote_models(page({"id": "far"}, legal, {"id": "far:high", "variant_of": "far"}))
    assert far.variants == ("+legal", "high")
    here = replace(CHAT, adapters=(Adapter("legal"),))
    ours = OfferedModel(RemoteModel("chat", variants=("+legal", "+poet")), 3, "box")
    named = OfferedModel(RemoteModel("chat+legal"), 3, "other box")
    model_infos = merged([here], [OfferedModel(far, 3, "box"), ours, named], 1)
    names = ModelNames(model_infos)
    assert names.resolve("far+legal").remote_variant == "+legal"
    assert names.resolve("chat+poet").remote_variant == "+poet"
    assert names.resolve("chat+legal").adapter == "legal"
    listed = ["chat", "chat+legal", "chat+poet", "far", "far+legal", "far:high"]
    assert [variant.id for variant in with_variants(model_infos)] == listed
