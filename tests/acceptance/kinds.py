"""Tiny models of each kind are served, unloaded and loaded again; prints the tokens found.

Text, vision, hybrid, and vision on a hybrid model that drafts with its own layers: tokens that the
slot held before, and that the engine found after. Another picture must not be taken for the first
one. Embeddings and ranks must be the same before and after. Then, for each kind and a template that
keeps or leaves out the reasoning of earlier answers, how many tokens of the history the next turn
finds: running, and after a kill -9 of the daemon and its engines. At least 95 % must be found
(`--ahead-share 0` shows what is found without computing ahead, `--api messages` or `--api
responses` what is found through another API, and `--kinds qwen35` some kinds alone). Exits with 1
after any deviation.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

from support import tiny_bert, tiny_clip, tiny_gguf, tiny_hybrid
from support.corral_cli import CorralCli, until

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


_OTHERS: Final[tuple[Literal["lfm2", "jamba", "mamba"], ...]] = ("lfm2", "jamba", "mamba")
# By kind: the function that writes its model, and its flags.
_KINDS: Final[Mapping[str, tuple[Callable[..., Path], str]]] = {
    "dense": (tiny_gguf.make, ""),
    "window": (functools.partial(tiny_gguf.make, layers=6, window=64), ""),
    "qwen35": (tiny_hybrid.make, ""),
    "qwen35-mtp": (
        functools.partial(tiny_hybrid.make, drafts=True),
        'spec-type = "draft-mtp", ',
    ),
    **{
        name: (functools.partial(tiny_hybrid.make_other, architecture=name), "") for name in _OTHERS
    },
}
_TEMPLATES: Final = {
    "keeps": (tiny_gguf.CHAT_TEMPLATE, 'root ::= "a river and a stone and a cloud"'),
    "drops": (tiny_gguf.REASONING_TEMPLATE, tiny_gguf.REASONED),
}
_FOUND_MIN: Final = 0.95
# By API: its page, and its members for the messages and the longest answer.
_APIS: Final = {
    "chat": ("/v1/chat/completions", "messages", "max_tokens"),
    "messages": ("/v1/messages", "messages", "max_tokens"),
    "responses": ("/v1/responses", "input", "max_output_tokens"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ahead-share", type=float, default=0.2)
    parser.add_argument("--api", choices=_APIS, default="chat")
    parser.add_argument("--kinds", nargs="+", choices=_KINDS)
    given = parser.parse_args()
    is_whole = given.api == "chat" and not given.kinds
    return (is_whole and _unloaded_and_loaded()) | _next_turns(
        given.ahead_share, given.api, given.kinds or list(_KINDS)
    )


def _next_turns(ahead_share: float, api: str, kinds: Sequence[str]) -> int:
    """Print the tokens that the next turn finds, by kind and template; return 1 if too few."""
    print(f"{'kind':12}{'template':10}{'running':>16}{'after kill -9':>16}")
    is_enough = True
    for kind in kinds:
        make, flags = _KINDS[kind]
        for name, (template, grammar) in _TEMPLATES.items():
            with tempfile.TemporaryDirectory() as directory:
                corral = CorralCli(Path(directory))
                path = make(Path(directory, "chat.gguf"), mode="cycle", chat_template=template)
                said = f"grammar = '{grammar}', "  # Anthropic's API has no member for it
                settings = _SETTINGS.format(name="chat", path=path, flags=flags + said)
                proxy = f'[proxy]\nlisten = "127.0.0.1:0"\nahead_share = {ahead_share}\n'
                corral.configure(settings + proxy)
                try:
                    found = _found_of_history(corral, api)
                finally:
                    corral.end()
            figures = (f"{tokens} of {total}" for tokens, total in found)
            print(
                f"{kind:12}{name:10}" + "".join(f"{figure:>16}" for figure in figures), flush=True
            )
            is_enough = is_enough and all(tokens >= _FOUND_MIN * total for tokens, total in found)
    return 0 if is_enough or not ahead_share else 1


def _found_of_history(corral: CorralCli, api: str) -> list[tuple[int, int]]:
    """Return the found tokens and all tokens of the history, running and after a kill -9."""
    corral.ok("start")
    messages, _ = _say(corral, api, _story(None))
    found = []
    for is_killed in (False, True):
        # Computed ahead or not, once the idle engine was looked at.
        _settle(corral)
        if is_killed:
            corral.ok("slots", "save")
            corral.kill()
            corral.ok("start")
        # A history without its next message, in tokens.
        template = {"model": "chat", "messages": messages[:-1], "add_generation_prompt": False}
        history = _ask(corral, "/apply-template", **template)["prompt"]
        tokens = {"model": "chat", "content": history, "add_special": True, "parse_special": True}
        total = len(_ask(corral, "/tokenize", **tokens)["tokens"])
        messages, tokens_found = _say(corral, api, messages)
        found.append((tokens_found, total))
    return found


def _say(
    corral: CorralCli, api: str, messages: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], int]:
    """Take a turn through an API; return the next turn's messages, and the found tokens."""
    page, member, limit = _APIS[api]
    body = {"model": "chat", member: messages, limit: 64, "temperature": 0}
    answer = _ask(corral, page, **body)
    match answer:
        case {"choices": [{"message": {"content": text}}], "timings": {"cache_n": found}}:
            pass
        case {"content": [*_, {"text": text}], "usage": {"cache_read_input_tokens": found}}:
            pass
        case {
            "output": [*_, {"content": [{"text": text}]}],
            "usage": {"input_tokens_details": {"cached_tokens": found}},
        }:
            pass
        case _:
            raise AssertionError(answer)
    then = [{"role": "assistant", "content": text}, {"role": "user", "content": "and then?"}]
    return [*messages, *then], found


def _settle(corral: CorralCli) -> None:
    """Wait until a next turn was computed ahead; where that does not pay, for three seconds."""
    before = len(corral.events("next_turn.computed"))
    with suppress(AssertionError):
        until(lambda: len(corral.events("next_turn.computed")) > before, within_s=3)


def _unloaded_and_loaded() -> int:
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
    body = {"model": model, "messages": messages, "temperature": 0, "max_tokens": 16}
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
