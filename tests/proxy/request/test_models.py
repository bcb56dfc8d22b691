"""Which model, and which variant of it, a name means."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.proxy_harness import model_info

from proxy.errors import BadRequest, UnknownModel
from proxy.request.models import ModelNames, ResolvedModel, with_variants
from proxy.request.variants import Variant

HIGH = Variant(temperature=1)
CHAT = replace(model_info("chat"), variants={"high": HIGH})
TINY = model_info("tiny")


@pytest.mark.parametrize("name", ["chat", "vendor/chat"])
def test_a_model_has_an_id_and_aliases_and_its_variants_stand_behind_each(name: str) -> None:
    assert ModelNames([TINY, CHAT]).resolve(name) == ResolvedModel(CHAT)
    assert ModelNames([TINY, CHAT]).resolve(f"{name}:high") == ResolvedModel(CHAT, HIGH)


def test_a_model_of_that_very_name_goes_before_a_variant() -> None:
    exact = model_info("chat:high")
    assert ModelNames([CHAT, exact]).resolve("chat:high") == ResolvedModel(exact)


def test_what_is_not_there_is_met_with_the_nearest_name_variants_among_them() -> None:
    with pytest.raises(UnknownModel, match=r"did you mean chat:high\? .*chat, chat:high, tiny"):
        ModelNames([CHAT, TINY]).resolve("chat:hihg")
    assert ModelNames([CHAT, TINY]).get("tiny:high") is None
    assert ModelNames([CHAT, TINY]).get(":high") is None


def test_no_name_means_the_only_model_however_many_variants_it_has() -> None:
    assert ModelNames([CHAT]).resolve(None) == ResolvedModel(CHAT)
    with pytest.raises(BadRequest, match="names no model"):
        ModelNames([CHAT, TINY]).resolve(None)


@pytest.mark.parametrize(
    ("default", "meant"),
    [
        ("tiny", ResolvedModel(TINY)),
        ("vendor/chat", ResolvedModel(CHAT)),
        ("chat:high", ResolvedModel(CHAT, HIGH)),
    ],
)
def test_no_name_means_the_default_model(default: str, meant: ResolvedModel) -> None:
    names = ModelNames([CHAT, TINY], default)
    assert names.resolve(None) == names.resolve("") == meant
    assert names.local.resolve(None) == meant
    with pytest.raises(UnknownModel):
        names.resolve("gpt-9")


def test_a_default_model_that_a_client_may_not_use_is_not_meant() -> None:
    names = ModelNames([CHAT, TINY, model_info("other")], "tiny")
    assert names.visible(frozenset({"tiny", "chat"})).resolve(None) == ResolvedModel(TINY)
    assert names.visible(frozenset({"chat"})).resolve(None) == ResolvedModel(CHAT)
    with pytest.raises(BadRequest, match="available models: chat, chat:high, other"):
        names.visible(frozenset({"chat", "other"})).resolve(None)


def test_any_other_name_means_the_catch_all() -> None:
    catch_all = replace(TINY, is_catch_all=True)
    names = ModelNames([CHAT, catch_all, model_info("other")])
    assert names.resolve("gpt-9") == names.resolve(None) == ResolvedModel(catch_all)
    assert names.resolve("chat:high") == ResolvedModel(CHAT, HIGH)
    assert ModelNames(names.model_infos, "chat").resolve(None) == ResolvedModel(CHAT)
    assert names.get("gpt-9") is None
    for hidden in (names.visible(frozenset({"chat", "other"})), names.local):
        with pytest.raises(UnknownModel):
            hidden.resolve("gpt-9")


def test_a_list_has_variants_as_separate_models() -> None:
    chat, high, tiny = with_variants([CHAT, TINY])
    assert (chat, tiny) == (CHAT, TINY)
    assert (high.id, high.aliases, high.state) == ("chat:high", ("vendor/chat:high",), "loaded")
    assert not high.variants
