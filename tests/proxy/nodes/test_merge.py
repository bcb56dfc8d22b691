"""Models here and there as one list."""

from __future__ import annotations

from dataclasses import replace

from fakes.proxy_harness import model_info

from proxy.nodes.merge import OfferedModel, local, merged, place_of
from proxy.nodes.model_list import RemoteModel
from proxy.variant import Variant

CHAT = model_info("chat", "unloaded")


def there(name: str, *aliases: str, node: str = "far", trouble: str | None = None) -> OfferedModel:
    return OfferedModel(RemoteModel(name, aliases, context_length=1024), 3, node, trouble)


def test_a_model_here_and_there_is_one_and_serves_while_either_does() -> None:
    (both,) = merged([CHAT], [there("chat")], 1)
    assert (both.id, both.state, both.slots) == ("chat", "loaded", CHAT.slots + 3)
    assert merged([CHAT], [there("chat", trouble="away")], 1) == [CHAT]


def test_a_node_may_know_a_model_of_ours_by_another_name() -> None:
    assert place_of(RemoteModel("Chat-7B.gguf", ("chat",)), [CHAT]) == "chat"
    assert place_of(RemoteModel("vendor/chat"), [CHAT]) == "chat"
    assert place_of(RemoteModel("other"), [CHAT]) == "other"


def test_a_nodes_variant_of_a_model_of_ours_is_left_to_ours() -> None:
    ours = replace(CHAT, variants={"high": Variant(temperature=1)})
    assert place_of(RemoteModel("chat:high"), [ours]) is None
    assert merged([ours], [there("chat:high")], 1) == [ours]


def test_a_model_that_only_nodes_have_fails_when_none_of_them_is_up() -> None:
    far = there("far", "f", trouble="is away")
    (_, found) = merged([CHAT], [far], 1)
    assert (found.state, found.reason, found.slots) == ("failed", "far: is away", 0)
    assert found.aliases == ("f",)
    (_, found) = merged([CHAT], [far, there("far", node="near")], 1)
    assert (found.state, found.reason, found.slots) == ("loaded", None, 3)


def test_for_other_proxies_there_is_only_what_is_here() -> None:
    model_infos = merged([CHAT], [there("chat"), there("far")], 1)
    assert local(model_infos) == [CHAT]
