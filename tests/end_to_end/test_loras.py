"""LoRA adapters by name, with the real engine: each request is computed with its own alone."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import tiny_gguf, tiny_lora
from support.corral_cli import CorralCli

SETTINGS = """
[models.chat]
path = "{path}/chat.gguf"
# One slot: each request finds what the one before it left there.
flags = {{ parallel = 1, ctx-size = 2048, threads = 1 }}
[models.chat.loras]
legal = "{path}/legal.gguf"
poet = {{ path = "{path}/poet.gguf", scale = 0.8 }}

# Two slots, so that a new conversation may get that of another adapter.
[models.pair]
path = "{path}/chat.gguf"
flags = {{ parallel = 2, ctx-size = 4096, threads = 1 }}
[models.pair.loras]
legal = "{path}/legal.gguf"

# The same adapter for every request, as a measure.
[models.fixed]
path = "{path}/chat.gguf"
flags = {{ lora = "{path}/legal.gguf", parallel = 1, ctx-size = 2048, threads = 1 }}
"""
TEXT = "the user in the system of the assistant on an error " * 12  # more than 256 tokens

Reply = tuple[str, int]


@pytest.fixture
def without_slot_files(corral: CorralCli) -> None:
    """A slot that was saved in time would be restored."""
    corral.env["CORRAL_SUPERVISOR__PERSIST_SLOTS"] = "false"


@pytest.fixture
def adapted(corral: CorralCli, tmp_path: Path) -> CorralCli:
    tiny_gguf.make(tmp_path / "chat.gguf")
    tiny_lora.make(tmp_path / "legal.gguf")
    tiny_lora.make(tmp_path / "poet.gguf", seed=2)
    corral.configure(SETTINGS.format(path=tmp_path))
    corral.ok("start")
    return corral


def ask(corral: CorralCli, page: str, **body: Any) -> Any:
    request = urllib.request.Request(
        f"{corral.url}{page}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def chat(corral: CorralCli, model: str, *more: str, **members: Any) -> Reply:
    """Return the text, and how many tokens of the prompt were cached."""
    messages = [{"role": "user", "content": text} for text in (TEXT, *more)]
    body = {"model": model, "messages": messages, "max_tokens": 12, "temperature": 0, **members}
    answer = ask(corral, "/v1/chat/completions", **body)
    return answer["choices"][0]["message"]["content"], answer["timings"]["cache_n"]


def completion(corral: CorralCli, model: str) -> Reply:
    answer = ask(corral, "/completion", model=model, prompt=TEXT, n_predict=12, temperature=0)
    return answer["content"], answer["timings"]["cache_n"]


def message(corral: CorralCli, model: str) -> Reply:
    messages = [{"role": "user", "content": TEXT}]
    body = {"model": model, "messages": messages, "max_tokens": 12, "temperature": 0}
    answer = ask(corral, "/v1/messages", **body)
    return answer["content"][0]["text"], answer["usage"]["cache_read_input_tokens"]


def response(corral: CorralCli, model: str) -> Reply:
    body = {"model": model, "input": TEXT, "max_output_tokens": 12, "temperature": 0}
    answer = ask(corral, "/v1/responses", **body)
    cached = answer["usage"]["input_tokens_details"]["cached_tokens"]
    return answer["output"][0]["content"][0]["text"], cached


@pytest.mark.usefixtures("without_slot_files")
@pytest.mark.parametrize("api", [chat, completion, message, response])
def test_each_request_is_computed_with_its_own_adapter(
    adapted: CorralCli, api: Callable[[CorralCli, str], Reply]
) -> None:
    legal = api(adapted, "fixed")[0]
    base = api(adapted, "chat")[0]
    assert api(adapted, "chat+legal") == (legal, 0)
    assert api(adapted, "chat") == (base, 0)
    assert api(adapted, "chat+poet")[1] == 0
    text, cached = api(adapted, "chat+legal")
    assert (text, cached) == (legal, 0) != (base, 0)
    text, cached = api(adapted, "chat+legal")
    assert text == legal
    assert cached > 100


def test_a_request_may_give_scales_and_adapters_are_listed_as_models(adapted: CorralCli) -> None:
    legal = chat(adapted, "chat+legal")[0]
    assert chat(adapted, "chat", lora=[{"name": "legal", "scale": 1}])[0] == legal
    assert chat(adapted, "chat", lora=[{"id": 0, "scale": 1}])[0] == legal
    half = chat(adapted, "chat", lora=[{"id": 0, "scale": 0.5}])
    assert half[0] != legal
    assert half[1] == 0
    with urllib.request.urlopen(f"{adapted.url}/v1/models", timeout=60) as listed:
        entries = {entry["id"]: entry for entry in json.load(listed)["data"]}
    assert list(entries) == ["chat", "chat+legal", "chat+poet", "pair", "pair+legal", "fixed"]
    assert entries["chat+legal"]["variant_of"] == "chat"
    with pytest.raises(urllib.error.HTTPError) as refused:
        chat(adapted, "chat+novel")
    with refused.value as answer:
        assert answer.code == 404


def test_a_request_gives_no_scales_to_an_adapter_of_all_requests(adapted: CorralCli) -> None:
    text = chat(adapted, "fixed")[0]
    with pytest.raises(urllib.error.HTTPError) as refused:
        chat(adapted, "fixed", lora=[{"id": 0, "scale": 0}])
    with refused.value as answer:
        assert answer.code == 400
        assert "leave out lora" in answer.read().decode()
    assert chat(adapted, "fixed")[0] == text


def test_a_conversation_uses_nothing_that_another_adapter_left_in_a_slot(
    adapted: CorralCli,
) -> None:
    fresh = chat(adapted, "pair", "an error", cache_prompt=False)[0]
    chat(adapted, "pair", "the user")
    chat(adapted, "pair+legal", "an error")
    chat(adapted, "pair", "the system")  # it shares its beginning with the first
    assert chat(adapted, "pair", "an error")[0] == fresh


def test_a_saved_conversation_is_restored_for_its_own_adapter_alone(adapted: CorralCli) -> None:
    half = [{"name": "legal", "scale": 0.5}]
    legal = chat(adapted, "pair+legal")[0]
    adapted.ok("restart", "pair")
    assert [slot["adapters"] for slot in adapted.data("slots", "list")] == [["legal"]]
    assert "ADAPTERS" in adapted.ok("slots", "list")
    text, cached = chat(adapted, "pair+legal")
    assert text == legal
    assert cached > 256
    adapted.ok("restart", "pair")
    found = {
        "base": chat(adapted, "pair"),
        "half": chat(adapted, "pair", lora=half),
        "legal": chat(adapted, "pair+legal")[0],
    }
    base = chat(adapted, "pair", cache_prompt=False)[0]
    other = chat(adapted, "pair", cache_prompt=False, lora=half)[0]
    assert found == {"base": (base, 0), "half": (other, 0), "legal": legal}
    assert len({base, other, legal}) == 3


def test_a_prefilled_prompt_uses_nothing_that_an_adapter_computed(adapted: CorralCli) -> None:
    chat(adapted, "chat+legal")
    path = adapted.root / "prompt.json"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": TEXT}]}))
    assert "0 already cached" in adapted.ok("warm", "chat", str(path))
