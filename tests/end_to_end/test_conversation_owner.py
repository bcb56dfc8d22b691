"""After a restart each conversation continues on the instance that saved it, from its cache."""

import json
import random
import urllib.request
from pathlib import Path
from typing import Any

from support.corral_cli import CorralCli

WORDS = ("river", "stone", "cloud", "window", "garden", "paper", "silver", "engine", "music")
SMALL = 'replicas = 2\nflags = { threads = 1, "threads-batch" = 1, ctx-size = 4096, parallel = 2 }'


class Conversation:
    """One conversation, over either API.

    Args:
        seed: Makes it differ from the others.
        path: Of the page.
    """

    def __init__(self, seed: int, path: str) -> None:
        chance = random.Random(seed)  # noqa: S311 (the same story each time)
        self.path = path
        self.messages = [{"role": "user", "content": " ".join(chance.choices(WORDS, k=150))}]
        self.instance = ""
        self.tokens = self.cached = 0

    def turn(self, corral: CorralCli) -> None:
        body = {"model": "chat", "messages": self.messages, "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            corral.url + self.path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            self.instance = response.headers["X-Corral-Instance"]
            self._take(json.load(response))

    def _take(self, answer: dict[str, Any]) -> None:
        if "content" in answer:
            said, usage = "".join(part["text"] for part in answer["content"]), answer["usage"]
            self.cached = usage["cache_read_input_tokens"]
            self.tokens = self.cached + usage["input_tokens"] + usage["output_tokens"]
        else:
            said, figures = answer["choices"][0]["message"]["content"], answer["timings"]
            self.cached = figures["cache_n"]
            self.tokens = self.cached + figures["prompt_n"] + figures["predicted_n"]
        self.messages.append({"role": "assistant", "content": said})
        self.messages.append({"role": "user", "content": "and then?"})


def test_each_conversation_returns_to_its_instance_after_a_restart(
    corral: CorralCli, tiny_model: Path
) -> None:
    corral.configure(f'[models.chat]\npath = "{tiny_model}"\n{SMALL}\n')
    corral.ok("start")
    pages = ("/v1/chat/completions", "/v1/chat/completions", "/v1/messages", "/v1/messages")
    conversations = [Conversation(seed, page) for seed, page in enumerate(pages)]
    for conversation in (*conversations, *conversations):
        conversation.turn(corral)
    owners, held = (
        [conversation.instance for conversation in conversations],
        [conversation.tokens for conversation in conversations],
    )
    assert sorted(owners) == ["chat.0", "chat.0", "chat.1", "chat.1"]
    corral.ok("stop")
    corral.ok("start")
    for conversation in reversed(conversations):
        conversation.turn(corral)
    assert [conversation.instance for conversation in conversations] == owners
    assert all(
        conversation.cached >= 0.95 * its
        for conversation, its in zip(conversations, held, strict=True)
    ), [(conversation.cached, its) for conversation, its in zip(conversations, held, strict=True)]
    assert '"slots.restore_unused"' not in (corral.root / "log" / "daemon.log").read_text()
