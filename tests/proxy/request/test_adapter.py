"""Each request of a model with LoRA adapters says how much of each it takes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from support.proxy_harness import model_info

from proxy.cache.prompt import ANYONE
from proxy.errors import BadRequest, UnknownModel
from proxy.request.models import ModelNames, ResolvedModel, with_variants
from proxy.request.request import ProxyRequest, json_request
from proxy.request.variants import Adapter, Variant, with_adapter
from proxy.settings import ProxySettings
from proxy.upstream.endpoint_kinds import EndpointKind

ADAPTERS = (Adapter("legal"), Adapter("poet", 0.5))
COLD = Variant(temperature=0)
CHAT = replace(model_info("chat"), adapters=ADAPTERS, variants={"cold": COLD})
MESSAGES = [{"role": "user", "content": "hello"}]


def scales(*values: float) -> list[dict[str, float]]:
    return [{"id": at, "scale": value} for at, value in enumerate(values)]


def read(kind: EndpointKind = EndpointKind.CHAT, **members: Any) -> ProxyRequest:
    body = json.dumps({"messages": MESSAGES, **members}).encode()
    return json_request(body, kind, None, ModelNames([CHAT]), ProxySettings(), ANYONE)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("", None, scales(0, 0)),
        ("", [], scales(0, 0)),
        ("legal", None, scales(1, 0)),
        ("poet", None, scales(0, 0.5)),
        ("", [{"id": 1, "scale": 2}], scales(0, 2)),
        ("", [{"name": "legal", "scale": 0.1}], scales(0.1, 0)),
        # The engine refuses these.
        ("", [{"id": 7, "scale": 1}], [{"id": 7, "scale": 1}]),
        ("", [{"id": True, "scale": 1}], [{"id": True, "scale": 1}]),
        ("", [{"id": 0}], [{"id": 0}]),
        ("", ["legal"], ["legal"]),
        ("", "legal", "legal"),
    ],
)
def test_every_adapter_has_a_scale(name: str, given: object, expected: object) -> None:
    members = {"lora": given} if given is not None else {}
    assert with_adapter(members, ADAPTERS, name)["lora"] == expected


def test_a_name_and_scales_contradict_each_other() -> None:
    with pytest.raises(BadRequest, match="leave out lora"):
        with_adapter({"lora": [{"id": 0, "scale": 1}]}, ADAPTERS, "legal")
    with pytest.raises(BadRequest, match="no adapter 'pet'; it has legal, poet"):
        with_adapter({"lora": [{"name": "pet", "scale": 1}]}, ADAPTERS, "")


@pytest.mark.parametrize("name", ["chat", "vendor/chat"])
def test_adapters_stand_behind_each_name_and_variants_behind_them(name: str) -> None:
    names = ModelNames([CHAT])
    assert names.resolve(f"{name}+legal") == ResolvedModel(CHAT, adapter="legal")
    assert names.resolve(f"{name}+poet:cold") == ResolvedModel(CHAT, COLD, adapter="poet")
    with pytest.raises(UnknownModel, match=r"did you mean chat\+legal"):
        names.resolve("chat+legl")


def test_a_model_of_that_very_name_goes_before_an_adapter() -> None:
    exact = model_info("chat+legal")
    assert ModelNames([CHAT, exact]).resolve("chat+legal") == ResolvedModel(exact)


def test_adapters_are_listed_as_models() -> None:
    listed = {variant.id: variant for variant in with_variants([CHAT])}
    assert list(listed) == ["chat", "chat+legal", "chat+poet", "chat:cold"]
    assert listed["chat+legal"].variant_of == "chat"
    assert listed["chat+legal"].aliases == ("vendor/chat+legal",)


def test_a_request_has_the_scales_of_the_name_it_asked_for() -> None:
    assert read(model="chat").json["lora"] == scales(0, 0)
    legal = read(model="chat+legal")
    assert (legal.model, legal.adapter, legal.json["lora"]) == ("chat", "legal", scales(1, 0))
    assert json.loads(legal.body)["lora"] == scales(1, 0)
    own = read(model="chat", lora=[{"name": "legal", "scale": 1}])
    assert (own.adapter, own.json["lora"]) == (None, scales(1, 0))
    assert "lora" not in read(EndpointKind.PROMPT, model="chat+legal").json


def test_prompts_of_different_adapters_share_nothing() -> None:
    prompts = {
        name: read(model=name).prompt for name in ("chat", "chat+legal", "chat+poet", "chat:cold")
    }
    hashes = {name: prompt.turn_hashes for name, prompt in prompts.items() if prompt}
    assert len(hashes) == 4
    assert hashes["chat"] == hashes["chat:cold"]
    assert len(set(hashes.values())) == 3
    own = read(model="chat", lora=[{"id": 0, "scale": 1}]).prompt
    assert own is not None
    assert own.turn_hashes == hashes["chat+legal"]


def test_a_key_for_one_adapter_sees_nothing_else_of_the_model() -> None:
    names = ModelNames([replace(CHAT, is_catch_all=True), model_info("other")], "chat")
    legal = names.visible(frozenset({"chat+legal"}))
    assert legal.resolve("vendor/chat+legal").adapter == "legal"
    assert legal.resolve("chat+legal:cold").variant == COLD
    assert [variant.id for variant in with_variants(legal.model_infos)] == ["chat+legal"]
    for name in ("chat", "chat:cold", "chat+poet", "other", "anything"):
        with pytest.raises(UnknownModel, match=r"available models: chat\+legal\)"):
            legal.resolve(name)
    with pytest.raises(BadRequest):
        legal.resolve(None)
    assert names.visible(frozenset({"chat"})).resolve("chat+poet").adapter == "poet"


def test_a_request_gives_no_scales_to_an_adapter_of_all_requests() -> None:
    names = ModelNames([replace(model_info("chat"), has_fixed_adapters=True)])

    def read_fixed(**members: Any) -> ProxyRequest:
        body = json.dumps({"messages": MESSAGES, **members}).encode()
        return json_request(body, EndpointKind.CHAT, None, names, ProxySettings(), ANYONE)

    assert "lora" not in read_fixed().json
    with pytest.raises(BadRequest, match=r"leave out lora, or .* under loras of this model"):
        read_fixed(lora=scales(0))
