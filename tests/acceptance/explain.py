"""Prepare ten causes of a slow request with the real engine; print which one is named for each.

Each is played against a daemon with tiny models, as a client would cause it. Exits with 1 if
another cause is named than the prepared one, or if `corral explain` says something else than the
response.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import socket
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil
from support import tiny_gguf
from support.corral_cli import CorralCli, until

_WORDS: Final = ("river", "stone", "cloud", "window", "garden", "paper", "silver", "music")
_SETTINGS: Final = """
[models.one]
path = "{tiny}"
flags = {{ threads = 1, ctx-size = 8192, parallel = 2 }}

[models.pair]
path = "{tiny}"
replicas = 2
flags = {{ threads = 1, ctx-size = 4096, parallel = 1 }}

[models.narrow]
path = "{tiny}"
flags = {{ threads = 1, ctx-size = 4096, parallel = 1, cache-ram = 0 }}

[models.brief]
path = "{tiny}"
ttl_s = 1
flags = {{ threads = 1, ctx-size = 4096, parallel = 1 }}

[models.window]
path = "{window}"
flags = {{ threads = 1, ctx-size = 4096, parallel = 1, ctx-checkpoints = 0 }}

[models.talker]
path = "{slow}"
flags = {{ threads = 1, ctx-size = 32768, parallel = 1 }}

[models.fast]
path = "{fast}"
flags = {{ threads = 1, ctx-size = 8192, parallel = 1 }}

[supervisor]
persist_slots = false
"""
_TIMEOUT_S: Final = 120
_UNREAD_S: Final = 20.0

Messages = list[dict[str, Any]]
Explained = Mapping[str, Any]


class Client:
    """Asks the daemon, and asks why it took so long."""

    def __init__(self, corral: CorralCli) -> None:
        self.corral = corral
        self.port = int(corral.url.rpartition(":")[2])
        self._random = random.Random(7)  # noqa: S311 (the same texts each time)

    def text(self, words: int) -> str:
        return " ".join(self._random.choices(_WORDS, k=words))

    def ask(self, model: str, messages: Messages, **members: Any) -> Explained:
        """Send a chat, and put the answer behind its messages; return the explanation."""
        body = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0, **members}
        request = urllib.request.Request(
            f"{self.corral.url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "X-Corral-Explain": "1"},
        )
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            answer = json.load(response)
        messages.append(answer["choices"][0]["message"])
        explained: Explained = answer["corral"]
        return explained

    def stream(
        self, model: str, tokens: int, *, buffer_bytes: int = 0, **members: Any
    ) -> http.client.HTTPResponse:
        """Begin a stream; return it once its first bytes are there."""
        connection = _Connection(self.port, buffer_bytes)
        messages = [{"role": "user", "content": "say the alphabet"}]
        body = {
            "model": model,
            "messages": messages,
            "max_tokens": tokens,
            "stream": True,
            **members,
        }
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        response.readline()
        return response

    def later(self, request_id: str) -> Explained:
        """Explain a request that has ended."""
        explained: list[Explained] = []

        def is_there() -> bool:
            url = f"{self.corral.url}/corral/v1/requests/{request_id}/explanation"
            try:
                with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
                    explained.append(json.load(response))
            except urllib.error.HTTPError:
                return False
            return True

        until(is_there)
        return explained[0]


class _Connection(http.client.HTTPConnection):
    def __init__(self, port: int, buffer_bytes: int) -> None:
        super().__init__("127.0.0.1", port, timeout=_TIMEOUT_S)
        self._buffer_bytes = buffer_bytes

    def connect(self) -> None:
        self.sock = socket.socket()
        if self._buffer_bytes:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._buffer_bytes)
        self.sock.connect((self.host, self.port))


def _chat(client: Client, system: str = "") -> Messages:
    leading = [{"role": "system", "content": system}] if system else []
    return [*leading, {"role": "user", "content": client.text(100)}]


def _more(messages: Messages, text: str = "and what came after that, in a few words?") -> Messages:
    messages.append({"role": "user", "content": text})
    return messages


def system_prompt_changed(client: Client) -> Explained:
    rules, more = client.text(60), client.text(60)
    explained: Explained = {}
    for minute in range(4):
        system = f"{rules} It is {minute} minutes past ten. {more}"
        explained = client.ask("one", _chat(client, system))
    return explained


def tools_changed(client: Client) -> Explained:
    def tool(name: str) -> dict[str, Any]:
        parameters = {"type": "object", "properties": {}}
        about = {"name": name, "description": client.text(20), "parameters": parameters}
        return {"type": "function", "function": about}

    tools = [tool("look"), tool("read")]
    messages = _chat(client, client.text(60))
    client.ask("one", messages, tools=tools)
    return client.ask("one", _more(messages), tools=[*tools[:1], tool("write")])


def history_truncated(client: Client) -> Explained:
    messages = _chat(client, client.text(30))
    for _ in range(3):
        client.ask("one", messages)
        _more(messages, client.text(60))
    client.ask("one", messages)
    del messages[1:3]
    return client.ask("one", _more(messages))


def other_instance(client: Client) -> Explained:
    messages = _chat(client)
    owner = client.ask("pair", messages)["instance"]
    busy = [client.stream("pair", 3000)]
    if busy[0].headers["X-Corral-Instance"] != owner:
        busy.insert(0, client.stream("pair", 3000))
        busy.pop().close()
        until(lambda: client.corral.slots_busy() == 1)
    explained = client.ask("pair", _more(messages))
    busy[0].close()
    return explained


def slot_evicted(client: Client) -> Explained:
    messages = _chat(client)
    client.ask("narrow", messages)
    client.ask("narrow", _chat(client))
    return client.ask("narrow", _more(messages))


def model_unloaded(client: Client) -> Explained:
    messages = _chat(client)
    client.ask("brief", messages)
    until(lambda: client.corral.model_states()["brief"] == "unloaded")
    return client.ask("brief", _more(messages))


def queue(client: Client) -> Explained:
    busy = client.stream("talker", 500)
    threading.Thread(target=busy.read).start()
    return client.ask("talker", _chat(client))


def slow_client(client: Client) -> Explained:
    # Some kB for each token: more than the kernel holds for a client.
    large = {"logprobs": True, "top_logprobs": 20}
    stream = client.stream("fast", 4000, buffer_bytes=4096, **large)
    time.sleep(_UNREAD_S)
    stream.read()
    return client.later(stream.headers["X-Request-Id"])


def engine_restarted(client: Client) -> Explained:
    messages = _chat(client)
    client.ask("narrow", messages)
    before = client.corral.instances()["narrow.0"]
    psutil.Process(before.pid or 0).kill()
    until(lambda: client.corral.instances()["narrow.0"].run > before.run)
    return client.ask("narrow", _more(messages))


def sliding_window(client: Client) -> Explained:
    messages = _chat(client, client.text(100))
    client.ask("window", messages)
    client.ask("window", _more(messages, client.text(160)))
    messages[-2:] = []
    return client.ask("window", _more(messages, "no: what came before it?"))


_CAUSES: Final[Sequence[Callable[[Client], Explained]]] = (
    system_prompt_changed,
    tools_changed,
    history_truncated,
    other_instance,
    slot_evicted,
    model_unloaded,
    queue,
    slow_client,
    engine_restarted,
    sliding_window,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("causes", nargs="*", help="only these; all of them if none is given")
    asked = parser.parse_args().causes
    with tempfile.TemporaryDirectory(prefix="corral-") as directory:
        corral = CorralCli(Path(directory))
        try:
            _configure(corral, Path(directory))
            client = Client(corral)
            plays = [cause for cause in _CAUSES if not asked or cause.__name__ in asked]
            rights = [_play(client, play) for play in plays]
        finally:
            corral.end()
    print(f"{sum(rights)} of {len(rights)} named right")
    return 0 if all(rights) else 1


def _configure(corral: CorralCli, directory: Path) -> None:
    models = {
        "tiny": tiny_gguf.make(directory / "tiny.gguf", ctx=8192),
        "window": tiny_gguf.make(directory / "window.gguf", window=64, layers=6, ctx=4096),
        "fast": tiny_gguf.make(directory / "fast.gguf", mode="cycle", ctx=8192),
        "slow": tiny_gguf.make_slow(directory / "slow.gguf"),
    }
    corral.configure(_SETTINGS.format(**models))
    corral.ok("start")


def _play(client: Client, prepared: Callable[[Client], Explained]) -> bool:
    explained, name = prepared(client), prepared.__name__
    is_right = bool(explained["cause"] == name)
    print(f"{'right' if is_right else 'WRONG':5}  {name:22} {explained['cause']}")
    print(f"       {explained['sentence']}")
    if not is_right:
        print(json.dumps(explained, indent=1))
    sys.stdout.flush()
    return is_right


if __name__ == "__main__":
    sys.exit(main())
