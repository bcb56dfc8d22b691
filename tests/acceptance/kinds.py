"""Tiny models of each kind are served, unloaded and loaded again; prints what is kept.

Text, vision, hybrid, and vision on a hybrid model that drafts with its own layers: tokens that the
slot held before, and that the engine found after. Another picture must not be taken for the first
one. Embeddings and ranks must be the same before and after. Exits with 1 after any deviation.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from support import tiny_bert, tiny_clip, tiny_gguf, tiny_hybrid
from support.corral_cli import CorralCli

_WORDS: Final = ("river", "stone", "cloud", "window", "garden", "paper", "silver", "music")
_RED, _BLUE = (tiny_clip.picture(colour) for colour in ((255, 0, 0), (0, 0, 255)))
_SETTINGS: Final = """
[models.{name}]
path = "{path}"
preload = false
flags = {{ {flags}threads = 1, ctx-size = 2048, parallel = 1 }}
"""
_CHATS: Final = {
    "text": ("text", ""),
    "vision": ("text", 'mmproj = "{clip}", '),
    "hybrid": ("hybrid", ""),
    "hybrid-vision-mtp": ("hybrid", 'mmproj = "{clip}", spec-type = "draft-mtp", '),
}


def main() -> int:
    with tempfile.TemporaryDirectory() as directory:
        corral = CorralCli(Path(directory))
        try:
            _configure(corral, Path(directory))
            rows = [_chat(corral, name) for name in _CHATS]
            rows += [_vectors(corral), _ranks(corral)]
        finally:
            corral.end()
    width = max(len(name) for name, _, _ in rows)
    for name, kept, _ in rows:
        print(f"{name:{width}}  {kept}")
    return 0 if all(is_right for _, _, is_right in rows) else 1


def _configure(corral: CorralCli, directory: Path) -> None:
    # Answers of the alphabet become the same tokens again as part of the next prompt.
    paths = {
        "text": tiny_gguf.make(directory / "text.gguf", mode="cycle"),
        "clip": tiny_clip.make(directory / "clip.gguf"),
        "hybrid": tiny_hybrid.make(directory / "hybrid.gguf", mode="cycle", drafts=True),
        "vectors": tiny_bert.make(directory / "vectors.gguf", "mean"),
        "ranks": tiny_bert.make(directory / "ranks.gguf", "rank"),
    }
    texts = [
        _SETTINGS.format(name=name, path=paths[model], flags=flags.format(**paths))
        for name, (model, flags) in _CHATS.items()
    ]
    texts += [f'[models.{name}]\npath = "{paths[name]}"\n' for name in ("vectors", "ranks")]
    corral.configure("\n".join(texts))
    corral.ok("start")


def _chat(corral: CorralCli, model: str) -> tuple[str, str, bool]:
    is_vision = "mmproj" in _CHATS[model][1]
    first, before = _turn(corral, model, _story(_RED if is_vision else None))
    _reload(corral, model)
    _, after = _turn(corral, model, first)
    held = before["cache_n"] + before["prompt_n"] + before["predicted_n"] - 1
    kept = f"{after['cache_n']} of {held} tokens found"
    is_right = after["cache_n"] >= held  # more where the next turn was computed ahead
    if after.get("draft_n"):
        kept += f", {after['draft_n_accepted']} of {after['draft_n']} drafted tokens accepted"
    if is_vision:
        _reload(corral, model)
        _, other = _turn(corral, model, _story(_BLUE))
        kept += f"; of another picture {other['cache_n']}"
        is_right = is_right and other["prompt_n"] > tiny_clip.TOKENS
    return model, kept, is_right


def _vectors(corral: CorralCli) -> tuple[str, str, bool]:
    def ask() -> Any:
        return _ask(corral, "/v1/embeddings", model="vectors", input=["a stone", "a cloud"])["data"]

    before = ask()
    _reload(corral, "vectors")
    is_right = before == ask()
    return "vectors", "the same after" if is_right else "others after", is_right


def _ranks(corral: CorralCli) -> tuple[str, str, bool]:
    def ask() -> Any:
        documents = ["a stone", "a cloud"]
        found = _ask(corral, "/v1/rerank", model="ranks", query="stone", documents=documents)
        return found["results"]

    before = ask()
    _reload(corral, "ranks")
    is_right = before == ask()
    return "ranks", "the same after" if is_right else "others after", is_right


def _reload(corral: CorralCli, model: str) -> None:
    corral.ok("stop", model)
    corral.ok("start", model)


def _story(picture: str | None) -> list[dict[str, Any]]:
    chance = random.Random(1)  # noqa: S311 (the same story each time)
    before, after = (" ".join(chance.choices(_WORDS, k=count)) for count in (20, 80))
    if picture is None:
        return [{"role": "user", "content": f"{before} {after}"}]
    texts = [{"type": "text", "text": text} for text in (before, after)]
    image = {"type": "image_url", "image_url": {"url": picture}}
    return [{"role": "user", "content": [texts[0], image, texts[1]]}]


def _turn(
    corral: CorralCli, model: str, messages: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], Mapping[str, Any]]:
    body = {"model": model, "messages": messages, "max_tokens": 16, "temperature": 0}
    answer = _ask(corral, "/v1/chat/completions", **body)
    said = answer["choices"][0]["message"]["content"]
    then = [{"role": "assistant", "content": said}, {"role": "user", "content": "and then?"}]
    return [*messages, *then], answer["timings"]


def _ask(corral: CorralCli, page: str, **body: Any) -> Any:
    request = urllib.request.Request(
        f"{corral.url}{page}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


if __name__ == "__main__":
    sys.exit(main())
