"""Models here and there as one list."""

from __future__ import annotations

from dataclasses import replace

from fakes.house import card

from proxy.carry.variant import Variant
from proxy.nodes.cards import Offered, combined, local, place_of
from proxy.nodes.offer import Offer

CHAT = card("chat", "unloaded")


def there(name: str, *aliases: str, node: str = "far", trouble: str | None = None) -> Offered:
    return Offered(Offer(name, aliases, context_length=1024), 3, node, trouble)


def test_a_model_here_and_there_is_one_and_serves_while_either_does() -> None:
    (both,) = combined([CHAT], [there("chat")], 1)
    assert (both.id, both.state, both.slots) == ("chat", "loaded", CHAT.slots + 3)
    assert combined([CHAT], [there("chat", trouble="away")], 1) == [CHAT]


def test_a_node_may_know_a_model_of_ours_by_another_name() -> None:
    assert place_of(Offer("Chat-7B.gguf", ("chat",)), [CHAT]) == "chat"
    assert place_of(Offer("vendor/chat"), [CHAT]) == "chat"
    assert place_of(Offer("other"), [CHAT]) == "other"


def test_a_nodes_variant_of_a_model_of_ours_is_left_to_ours() -> None:
    ours = replace(CHAT, variants={"high": Variant({"temperature": 1})})
    assert place_of(Offer("chat:high"), [ours]) is None
    assert combined([ours], [there("chat:high")], 1) == [ours]


def test_a_model_that_only_nodes_have_fails_when_none_of_them_is_up() -> None:
    far = there("far", "f", trouble="is away")
    (_, found) = combined([CHAT], [far], 1)
    assert (found.state, found.reason, found.slots) == ("failed", "far: is away", 0)
    assert found.aliases == ("f",)
    (_, found) = combined([CHAT], [far, there("far", node="near")], 1)
    assert (found.state, found.reason, found.slots) == ("loaded", None, 3)


def test_for_other_proxies_there_is_only_what_is_here() -> None:
    cards = combined([CHAT], [there("chat"), there("far")], 1)
    assert local(cards) == [CHAT]
