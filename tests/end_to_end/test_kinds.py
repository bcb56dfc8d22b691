"""Models of other kinds are served, swapped for each other, and keep their conversations."""

import json
import random
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from support import tiny_bert, tiny_clip, tiny_gguf, tiny_hybrid
from support.corral_cli import CorralCli, until

# Each takes about 40 MiB at its start: two fit, three do not.
SETTINGS = """
[supervisor]
memory_budget = "100 MiB"
eviction_wait_s = 0.5

[models.vision]
path = "{text}"
preload = false
flags = {{ mmproj = "{clip}", threads = 1, ctx-size = 2048, parallel = 1 }}

[models.hybrid]
path = "{hybrid}"
preload = false
flags = {{ threads = 1, ctx-size = 4096, parallel = 2 }}

[models.vectors]
path = "{vectors}"
preload = false

[models.ranks]
path = "{ranks}"
preload = false
"""
WORDS = ("river", "stone", "cloud", "window", "garden", "paper", "silver", "engine", "music")
RED, BLUE = (tiny_clip.picture(colour) for colour in ((255, 0, 0), (0, 0, 255)))

Messages = list[dict[str, Any]]


@pytest.fixture
def models(corral: CorralCli, tmp_path: Path) -> CorralCli:
    paths = {
        "text": tiny_gguf.make(tmp_path / "text.gguf"),
        "clip": tiny_clip.make(tmp_path / "clip.gguf"),
        # Its answers become the same tokens again as part of the next prompt.
        "hybrid": tiny_hybrid.make(tmp_path / "hybrid.gguf", mode="cycle"),
        "vectors": tiny_bert.make(tmp_path / "vectors.gguf", "mean"),
        "ranks": tiny_bert.make(tmp_path / "ranks.gguf", "rank"),
    }
    corral.configure(SETTINGS.format(**paths))
    corral.ok("start")
    return corral


def ask(corral: CorralCli, page: str, **body: Any) -> Any:
    request = urllib.request.Request(
        f"{corral.url}{page}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def turn(corral: CorralCli, model: str, messages: Messages) -> tuple[Messages, Any]:
    """Return the conversation with its next turn, and the engine's timings."""
    body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0}
    answer = ask(corral, "/v1/chat/completions", **body)
    said = answer["choices"][0]["message"]
    then = [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": "and?"}]
    return [*messages, *then], answer["timings"]


def story(picture: str | None = None) -> Messages:
    chance = random.Random(1)  # noqa: S311 (the same story each time)
    before, after = (" ".join(chance.choices(WORDS, k=count)) for count in (20, 80))
    if picture is None:
        return [{"role": "user", "content": f"{before} {after}"}]
    parts = [{"type": "text", "text": text} for text in (before, after)]
    return [
        {
            "role": "user",
            "content": [parts[0], {"type": "image_url", "image_url": {"url": picture}}, parts[1]],
        }
    ]


def held(timings: Any) -> int:
    """Tokens that the slot holds: the last one of the answer is not computed."""
    return int(timings["cache_n"] + timings["prompt_n"] + timings["predicted_n"] - 1)


def test_each_kind_is_served_and_swapped_and_conversations_are_kept(models: CorralCli) -> None:
    hybrid, of_hybrid = turn(models, "hybrid", story())
    seen, with_picture = turn(models, "vision", story(RED))
    vectors = ask(models, "/v1/embeddings", model="vectors", input=["a", "b"])["data"]
    assert [len(vector["embedding"]) for vector in vectors] == [64, 64]
    ranks = ask(models, "/v1/rerank", model="ranks", query="a", documents=["a", "b"])
    assert len(ranks["results"]) == 2
    states = models.model_states()
    assert states["vision"] == states["hybrid"] == "unloaded"
    # More where the beginning of the next message was computed ahead.
    assert turn(models, "hybrid", hybrid)[1]["cache_n"] >= held(of_hybrid)
    # Its answer may become other tokens as part of the next prompt.
    assert turn(models, "vision", seen)[1]["cache_n"] >= 0.95 * held(with_picture)
    for model, least in (("hybrid", held(of_hybrid)), ("vision", 0.95 * held(with_picture))):
        conversations = models.data("plan", model)["conversations"]
        assert conversations["kept"]
        assert conversations["restored"]["found_tokens"] >= least


def test_a_restored_conversation_is_not_taken_for_one_with_another_picture(
    models: CorralCli,
) -> None:
    """The weights are random: with another picture the answer is another."""
    of_blue, _ = turn(models, "vision", story(BLUE))
    of_red, timings = turn(models, "vision", story(RED))
    models.ok("stop", "vision")
    models.ok("start", "vision")
    restored, again = turn(models, "vision", story(BLUE))
    assert restored[1]["content"] == of_blue[1]["content"] != of_red[1]["content"]
    assert 0 < again["cache_n"] < 0.5 * held(timings)
    assert again["prompt_n"] > tiny_clip.TOKENS


def reasoned_turn(corral: CorralCli, messages: Messages) -> tuple[Messages, Any]:
    """Return the conversation with its next turn, once that is computed ahead, and the timings."""
    before = len(corral.events("next_turn.computed"))
    body = {"model": "chat", "messages": messages, "max_tokens": 64, "temperature": 0}
    answer = ask(corral, "/v1/chat/completions", grammar=tiny_gguf.REASONED, **body)
    said = answer["choices"][0]["message"]
    assert "reasoning_content" in said
    until(lambda: len(corral.events("next_turn.computed")) > before)
    then = [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": "and?"}]
    return [*messages, *then], answer["timings"]


@pytest.mark.parametrize("kind", ["hybrid", "window"])
def test_the_next_turn_is_found_where_the_template_leaves_out_the_reasoning(
    corral: CorralCli, tmp_path: Path, kind: str
) -> None:
    model, template = tmp_path / "model.gguf", tiny_gguf.REASONING_TEMPLATE
    if kind == "hybrid":
        tiny_hybrid.make(model, mode="cycle", chat_template=template)
    else:
        tiny_gguf.make(model, mode="cycle", layers=6, window=64, chat_template=template)
    corral.configure(
        f'[models.chat]\npath = "{model}"\n'
        "flags = { threads = 1, ctx-size = 4096, parallel = 2 }\n"
    )
    corral.ok("start")
    second, _ = reasoned_turn(corral, story())
    third, timings = reasoned_turn(corral, second)
    first_ahead, second_ahead = (event["tokens"] for event in corral.events("next_turn.computed"))
    assert timings["cache_n"] == first_ahead
    assert "computed ahead" in corral.ok("slots")
    corral.ok("slots", "save")
    corral.kill()
    corral.ok("start")
    _, restored = reasoned_turn(corral, third)
    assert restored["cache_n"] == second_ahead
