"""Compare `corral usage` with the engines' own counters over mixed requests and a kill -9.

The engines are the real ones, with tiny models. Three keys send streams, whole responses, text
completions, embeddings, Anthropic's, OpenAI's Responses and Ollama's API, several choices, batches,
and requests that are cut off in prefill, in decoding or before a slot is free. After each part the
engines are idle, and what is recorded must be what they counted, token for token. In between the
daemon is killed while requests run: what is lost must be theirs alone.

Exits with 1 if a sum differs.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support import tiny_gguf  # noqa: E402 (found by the line above, as those after it)
from support.corral_cli import CorralCli  # noqa: E402

from proxy.upstream.engine_state import plain_values  # noqa: E402
from supervisor.records.usage import INTERNAL_WORK  # noqa: E402

SETTINGS = """
[proxy]
listen = "127.0.0.1:0"
api_keys_file = "{keys}"
[proxy.ollama]
enabled = true
[models.chat]
path = "{chat}"
flags = {{ parallel = 4, ctx-size = 16384, threads = 1, batch-size = 64, ubatch-size = 64 }}
[models.vectors]
path = "{vectors}"
flags = {{ parallel = 2, ctx-size = 4096, threads = 1, embeddings = true, pooling = "mean" }}
"""
_AT_ONCE = 8
# Of one request: several prompts, or a long one, or a long answer.
_LARGEST = 4000
_NAMES = ("prompt_tokens", "cached_tokens", "generated_tokens")
_COUNTERS = ("prompt_tokens_total", "prompt_tokens_cached_total", "tokens_predicted_total")
_WORDS = ("the", "an", "in", "of", "on", "user")

Figures = tuple[int, int, int]
Send = Callable[["Client"], Awaitable[None]]


class Client:
    """Sends one request of each kind; `chance` decides their sizes."""

    def __init__(self, http: httpx.AsyncClient, chance: random.Random) -> None:
        self.http = http
        self.chance = chance

    def text(self, least: int, most: int) -> str:
        count = self.chance.randint(least, most)
        words = (self.chance.choice(_WORDS) + str(self.chance.randrange(99)) for _ in range(count))
        return " ".join(words)

    def chat(self, **members: Any) -> dict[str, Any]:
        said = {"role": "user", "content": self.text(5, 60)}
        return {"model": "chat", "messages": [said], "max_tokens": 20, **members}

    async def post(self, path: str, body: dict[str, Any]) -> None:
        (await self.http.post(path, json=body)).raise_for_status()

    async def cut(self, path: str, body: dict[str, Any], lines: int, limit_s: float) -> None:
        """Leave after some lines of a stream, or after a time."""
        try:
            async with (
                asyncio.timeout(limit_s),
                self.http.stream("POST", path, json={"stream": True, **body}) as response,
            ):
                async for _ in response.aiter_lines():
                    lines -= 1
                    if not lines:
                        return
        except TimeoutError:
            pass


async def chat_stream(client: Client) -> None:
    await client.post("/v1/chat/completions", client.chat(stream=True))


async def chat_whole(client: Client) -> None:
    await client.post("/v1/chat/completions", client.chat())


async def conversation(client: Client) -> None:
    messages: list[dict[str, str]] = [{"role": "user", "content": client.text(100, 200)}]
    for _ in range(2):
        body = {"model": "chat", "messages": messages, "max_tokens": 10}
        answer = (await client.http.post("/v1/chat/completions", json=body)).json()
        messages.append(answer["choices"][0]["message"])
        messages.append({"role": "user", "content": client.text(5, 20)})


async def choices(client: Client) -> None:
    is_stream = client.chance.random() < 0.5
    await client.post("/v1/chat/completions", client.chat(n=2, stream=is_stream))


async def completion(client: Client) -> None:
    is_stream = client.chance.random() < 0.5
    body = {"model": "chat", "prompt": client.text(5, 50), "max_tokens": 15, "stream": is_stream}
    await client.post("/v1/completions", body)


async def prompts(client: Client) -> None:
    texts = [client.text(5, 30) for _ in range(3)]
    await client.post("/v1/completions", {"model": "chat", "prompt": texts, "max_tokens": 8})


async def native(client: Client) -> None:
    is_stream = client.chance.random() < 0.5
    body = {"model": "chat", "prompt": client.text(5, 50), "n_predict": 15, "stream": is_stream}
    await client.post("/completion", body)


async def messages(client: Client) -> None:
    is_stream = client.chance.random() < 0.5
    await client.post("/v1/messages", client.chat(stream=is_stream))


async def responses(client: Client) -> None:
    is_stream = client.chance.random() < 0.5
    body = {"model": "chat", "input": client.text(5, 50), "max_output_tokens": 15}
    await client.post("/v1/responses", {**body, "stream": is_stream})


async def embeddings(client: Client) -> None:
    texts = [client.text(5, 60) for _ in range(client.chance.randint(1, 3))]
    await client.post("/v1/embeddings", {"model": "vectors", "input": texts})


async def batch(client: Client) -> None:
    texts = [client.text(5, 30) for _ in range(3)]
    await client.post("/v1/batch/completions", {"model": "chat", "prompts": texts, "n_predict": 8})


async def ollama(client: Client) -> None:
    options = {"num_predict": 12}
    if client.chance.random() < 0.5:
        body = {"model": "chat", "prompt": client.text(5, 40), "options": options}
        await client.post("/api/generate", body)
    else:
        said = [{"role": "user", "content": client.text(5, 40)}]
        await client.post("/api/chat", {"model": "chat", "messages": said, "options": options})


async def cut_in_decode(client: Client) -> None:
    body = client.chat(max_tokens=2000)
    await client.cut("/v1/chat/completions", body, client.chance.randint(5, 60), 30)


async def cut_whole(client: Client) -> None:
    body = client.chat(max_tokens=2000, stream=False)
    await client.cut("/v1/chat/completions", body, 1, client.chance.uniform(0.1, 1.5))


async def cut_messages(client: Client) -> None:
    body = client.chat(max_tokens=2000)
    await client.cut("/v1/messages", body, client.chance.randint(8, 60), 30)


async def cut_in_prefill(client: Client) -> None:
    said = [{"role": "user", "content": client.text(600, 900)}]
    body = client.chat(messages=said, return_progress=True)
    path = client.chance.choice(("/v1/chat/completions", "/v1/messages"))
    await client.cut(path, body, client.chance.randint(1, 8), client.chance.uniform(0.1, 2))


async def cut_at_once(client: Client) -> None:
    await client.cut("/v1/chat/completions", client.chat(), 1, client.chance.uniform(0, 0.05))


KINDS: dict[Send, int] = {
    chat_stream: 6,
    chat_whole: 5,
    conversation: 2,
    choices: 3,
    completion: 4,
    prompts: 2,
    native: 3,
    messages: 4,
    responses: 3,
    embeddings: 5,
    batch: 2,
    ollama: 4,
    cut_in_decode: 4,
    cut_whole: 3,
    cut_messages: 2,
    cut_in_prefill: 4,
    cut_at_once: 2,
}


class Check:
    def __init__(self, corral: CorralCli, keys: Sequence[str], seed: int) -> None:
        self.corral = corral
        self.keys = keys
        self.chance = random.Random(seed)  # noqa: S311 (the same for the same seed)
        self.sent = Counter[str]()
        self.failed = Counter[str]()
        self.differs = False

    async def send(self, count: int) -> int:
        """Send requests, some at once; return how many were left when the daemon was gone."""
        todo = self.chance.choices(list(KINDS), list(KINDS.values()), k=count)
        url = self.corral.url
        async with asyncio.TaskGroup() as group:
            for _ in range(_AT_ONCE):
                group.create_task(self._work(url, todo))
        return len(todo)

    async def _work(self, url: str, todo: list[Send]) -> None:
        while todo:
            kind = todo.pop()
            key = self.chance.choice(self.keys)
            headers = {"Authorization": f"Bearer {key}"}
            async with httpx.AsyncClient(base_url=url, headers=headers, timeout=120) as http:
                self.sent[kind.__name__] += 1
                try:
                    await kind(Client(http, self.chance))
                except httpx.ConnectError:
                    self.sent[kind.__name__] -= 1
                    todo.append(kind)
                    return
                except httpx.HTTPError as error:
                    self.failed[f"{kind.__name__}: {type(error).__name__}"] += 1

    def recorded(self) -> Figures:
        rows = self.corral.data("usage")
        return _figures([sum(row[name] for row in rows) for name in _NAMES])

    def own(self) -> Figures:
        rows = [row for row in self.corral.data("usage") if row["key"] in INTERNAL_WORK]
        return _figures([sum(row[name] for row in rows) for name in _NAMES])

    def counted(self) -> Figures:
        """The counts of all engines, once they are idle."""
        return _sum(_engine_counters(instance.pid) for instance in self.corral.instances().values())

    def compare(self, part: str, before: Figures) -> None:
        """Wait until the usage recorded since `before` equals the engines' counts."""
        deadline = time.monotonic() + 20
        while (difference := _minus(self.counted(), _minus(self.recorded(), before))) != (0, 0, 0):
            if time.monotonic() > deadline:
                break
            time.sleep(1)
        self.show(f"{part}: engines", self.counted())
        self.show(f"{part}: recorded", _minus(self.recorded(), before))
        self.show(f"{part}: difference", difference)
        self.differs |= difference != (0, 0, 0)

    def show(self, what: str, figures: Figures) -> None:
        print(f"{what:32}{figures[0]:>12}{figures[1]:>12}{figures[2]:>12}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="u-") as directory:
        corral = CorralCli(Path(directory))
        try:
            return asyncio.run(_run(corral, Path(directory), options.requests, options.seed))
        finally:
            corral.end()


async def _run(corral: CorralCli, root: Path, count: int, seed: int) -> int:
    check = Check(corral, _configure(corral, root), seed)
    daemon = corral.serve()
    print(f"{'':32}{'prompt':>12}{'cached':>12}{'generated':>12}")
    nothing = (0, 0, 0)
    await check.send(count // 2)
    check.compare("before the kill", nothing)
    engines = [instance.pid for instance in corral.instances().values()]
    async with asyncio.TaskGroup() as group:
        sending = group.create_task(check.send(count // 4))
        await asyncio.sleep(check.chance.uniform(4, 6))
        in_flight = len(corral.data("requests"))
        # The engines finish their requests; their counts are read before they are gone.
        psutil.Process(daemon.pid).send_signal(signal.SIGSTOP)
        counted = await _counted_at_rest(engines)
        daemon.kill()
        daemon.wait()
    kept = check.recorded()
    check.show("at the kill: engines", counted)
    check.show("at the kill: recorded", kept)
    lost = _minus(counted, kept)
    check.show(f"lost with about {in_flight} in flight", lost)
    check.differs |= not all(0 <= entry <= _AT_ONCE * _LARGEST for entry in lost)
    corral.serve()
    await check.send(count - count // 2 - count // 4 + sending.result())
    check.compare("after the kill", kept)
    check.show("of these, no client's", check.own())
    print(corral.ok("usage"))
    print(f"{check.sent.total()} requests: {dict(check.sent)}")
    print(f"broken off by the kill: {dict(check.failed)}")
    print("the sums differ" if check.differs else "the sums are the same")
    return int(check.differs)


async def _counted_at_rest(pids: Sequence[int | None]) -> Figures:
    """The engines' counts when they have finished their requests."""
    for _ in range(100):
        if not any(_engine(pid)["requests_processing"] for pid in pids):
            break
        await asyncio.sleep(0.2)
    return _sum(map(_engine_counters, pids))


def _configure(corral: CorralCli, root: Path) -> list[str]:
    chat = tiny_gguf.make(
        root / "chat.gguf", embd=256, heads=8, kv_heads=2, layers=12, ff=1024, ctx=8192
    )
    vectors = tiny_gguf.make(root / "vectors.gguf")
    path = root / "config" / "keys.toml"
    corral.configure(SETTINGS.format(keys=path, chat=chat, vectors=vectors))
    return [corral.data("key", "add", name)["key"] for name in ("anna", "ben", "cora")]


def _engine_counters(pid: int | None) -> Figures:
    found = _engine(pid)
    return _figures([int(found.get(name, 0)) for name in _COUNTERS])


def _engine(pid: int | None) -> Mapping[str, float]:
    """Ask an engine itself for its metrics."""
    process = psutil.Process(pid or 0)
    words, key = process.cmdline(), process.environ()["LLAMA_API_KEY"]
    host = words[words.index("--host") + 1]
    transport = httpx.HTTPTransport(uds=host)
    with httpx.Client(transport=transport, headers={"Authorization": f"Bearer {key}"}) as http:
        return plain_values(http.get("http://engine/metrics").text)


def _sum(figures: Iterable[Figures]) -> Figures:
    return _figures(map(sum, zip(*figures, strict=True)))


def _minus(figures: Figures, other: Figures) -> Figures:
    return figures[0] - other[0], figures[1] - other[1], figures[2] - other[2]


def _figures(values: Any) -> Figures:
    prompt, cached, generated = values
    return prompt, cached, generated


if __name__ == "__main__":
    sys.exit(main())
