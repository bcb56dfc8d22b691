"""Which model, and which variant of it, a name means."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fakes.house import card

from proxy.carry.variant import Variant
from proxy.errors import BadRequest, UnknownModel
from proxy.roster import Pick, find, listed, seek

HIGH = Variant({"temperature": 1})
CHAT = replace(card("chat"), variants={"high": HIGH})
TINY = card("tiny")


@pytest.mark.parametrize("name", ["chat", "vendor/chat"])
def test_a_model_has_an_id_and_aliases_and_its_variants_stand_behind_each(name: str) -> None:
    assert find(name, [TINY, CHAT]) == Pick(CHAT)
    assert find(f"{name}:high", [TINY, CHAT]) == Pick(CHAT, HIGH)


def test_a_model_of_that_very_name_goes_before_a_variant() -> None:
    exact = card("chat:high")
    assert find("chat:high", [CHAT, exact]) == Pick(exact)


def test_what_is_not_there_is_met_with_the_nearest_name_variants_among_them() -> None:
    with pytest.raises(UnknownModel, match=r"did you mean chat:high\? .*chat, chat:high, tiny"):
        find("chat:hihg", [CHAT, TINY])
    assert seek("tiny:high", [CHAT, TINY]) is None
    assert seek(":high", [CHAT, TINY]) is None


def test_no_name_means_the_only_model_however_many_variants_it_has() -> None:
    assert find(None, [CHAT]) == Pick(CHAT)
    with pytest.raises(BadRequest, match="names no model"):
        find(None, [CHAT, TINY])


def test_a_list_has_variants_as_models_of_their_own() -> None:
    chat, high, tiny = listed([CHAT, TINY])
    assert (chat, tiny) == (CHAT, TINY)
    assert (high.id, high.aliases, high.state) == ("chat:high", ("vendor/chat:high",), "loaded")
    assert not high.variants
