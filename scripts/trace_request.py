"""Print every function of ours that one streaming chat request runs, in order of first entry.

The request has an API key and is the third turn of a conversation. It passes the real proxy in
this process, with a fake engine behind it that lists its slots as llama-server does. A generator or
coroutine counts where it starts; comprehensions do not count.

Calls are counted by the thing for which the client waits at the time. With `--sampled`, the request
is one that the estimator samples.

A `*` marks a step: a function that calls one in another module. Those a reader has to open to see
where the request goes next; the others stay in their module. A change of package is a pair of
neighbouring steps in different directories. It is a report: longer functions would satisfy a limit
as well as a straight way does.
"""

from __future__ import annotations

import asyncio
import math
import socket
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partialmethod
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, Self
from unittest.mock import patch

import aiohttp
import orjson

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from proxy.app import App, Backend  # noqa: E402
from proxy.endpoints.prometheus import Metrics  # noqa: E402
from proxy.observe.record import discard  # noqa: E402 (the path first)
from proxy.request.models import ModelInfo, ModelNames, OnLoad, do_nothing_on_load  # noqa: E402
from proxy.router import estimator  # noqa: E402
from proxy.router.router import Router  # noqa: E402
from proxy.server import Server  # noqa: E402
from proxy.settings import ProxySettings  # noqa: E402
from proxy.upstream.upstream import Upstream  # noqa: E402

_PACKAGES: Final = ("proxy", "supervisor")
_COMPREHENSIONS: Final = frozenset({"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"})
_KEY: Final = "sk-corral-trace-0123456789abcdef0123456789abcdef"
_TIMINGS: Final = (
    b'"timings":{"cache_n":0,"prompt_n":8,"prompt_ms":1,"predicted_n":2,"predicted_ms":1}'
)


# The estimator samples no request this soon after another.
_SAMPLE_PAUSE_S: Final = 1.0


_SEND: Final = socket.socket.send


class Trace:
    """The functions that were entered, the first first, and which of them are steps.

    Attributes:
        phase: The thing for which the client waits now.
        calls: Calls by phase.
    """

    def __init__(self) -> None:
        self.entered: dict[CodeType, None] = {}
        self.steps: set[CodeType] = set()
        self.phase = "until the engine has it"
        self.calls: Counter[str] = Counter()

    def __enter__(self) -> Self:
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _argument: object) -> None:
        if event != "call" or not _is_ours(frame.f_code):
            return
        self.calls[self.phase] += 1
        self.entered.setdefault(frame.f_code)
        caller = _caller(frame)
        if caller and _is_ours(caller) and caller.co_filename != frame.f_code.co_filename:
            self.steps.add(caller)

    def lines(self) -> list[str]:
        """Return path, line and name of each function."""
        return [
            f"{'*' if code in self.steps else ' '} "
            f"{_path(code)}:{code.co_firstlineno} {code.co_qualname}"
            for code in self.entered
        ]

    @property
    def package_changes(self) -> int:
        packages = [_path(code).parent for code in self.entered if code in self.steps]
        return sum(before != after for before, after in pairwise(packages))


def _send(sock: socket.socket, trace: Trace, data: bytes) -> int:
    """Send like `socket.send`, and note which part of the answer the client gets."""
    sent = _SEND(sock, data)
    if sock.family == socket.AF_INET:
        if b'"delta"' in data:
            trace.phase = "until its last byte"
        if data.endswith(b"0\r\n\r\n"):
            trace.phase = "after it"
    return sent


def _caller(frame: FrameType) -> CodeType | None:
    """Return the function that called a frame, past a comprehension."""
    before = frame.f_back
    while before and before.f_code.co_name in _COMPREHENSIONS:
        before = before.f_back
    return before.f_code if before else None


def _is_ours(code: CodeType) -> bool:
    path = Path(code.co_filename)
    is_function = code.co_name not in _COMPREHENSIONS and code.co_name != "<module>"
    return is_function and path.is_relative_to(ROOT) and _path(code).parts[0] in _PACKAGES


def _path(code: CodeType) -> Path:
    return Path(code.co_filename).relative_to(ROOT)


class OneModel:
    """A loader whose only model is loaded (proxy.request.models.ModelLoader)."""

    _names = ModelNames([ModelInfo("chat", (), "loaded", 1_700_000_000, 4096, 2)])

    def models(self) -> Sequence[ModelInfo]:
        return self._names.model_infos

    def names(self) -> ModelNames:
        return self._names

    async def ensure_ready(self, model: str, on_load: OnLoad = do_nothing_on_load) -> None:
        """Do nothing: it is."""


class Engine:
    """Answers each chat with two tokens from slot 1, and lists its two slots."""

    def __init__(self, trace: Trace) -> None:
        self._task = -1
        self._trace = trace

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one request and close the connection."""
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /slots"):
            writer.write(_whole(self._slots()))
        else:
            self._task += 1
            self._trace.phase = "until its first token"
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n"
            )
            for event in _events():
                writer.write(b"%x\r\n%b\r\n" % (len(event), event))
                await writer.drain()
                await asyncio.sleep(0.01)
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        writer.close()

    def _slots(self) -> bytes:
        unused = {"id": 0, "is_processing": False, "n_prompt_tokens": 0}
        used = {"id": 1, "id_task": self._task, "is_processing": False, "n_prompt_tokens": 10}
        return orjson.dumps([unused, used])


def _events() -> list[bytes]:
    deltas = [b'{"role":"assistant","content":null}', b'{"content":"Hi"}', b'{"content":" there"}']
    piece = b'data: {"choices":[{"finish_reason":%b,"index":0,"delta":%b}]%b}\n\n'
    progress = b',"prompt_progress":{"total":8,"cache":0,"processed":8,"time_ms":1}'
    first = piece % (b"null", deltas[0], progress)
    texts = [piece % (b"null", delta, b"") for delta in deltas]
    last = piece % (b'"stop"', b"{}", b"," + _TIMINGS)
    return [first, *texts, last + b"data: [DONE]\n\n"]


def _whole(body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(body) + body


@asynccontextmanager
async def _proxy(
    directory: Path, trace: Trace
) -> AsyncIterator[Callable[[list[dict[str, str]]], Any]]:
    """Run engine and proxy; yields a function that posts a chat."""
    keys, socket = directory / "keys.toml", directory / "engine.sock"
    keys.write_text(f'[keys.trace]\nkey = "{_KEY}"\n')
    keys.chmod(0o600)
    settings = ProxySettings(listen="127.0.0.1:0", api_keys_file=keys)
    router = Router(settings)
    router.admit(
        Upstream("chat.1", "chat", 2, str(socket), "", 0, api_key="inner", can_name_slots=True)
    )
    app = App(router, settings, Metrics(settings, discard), Backend(loader=OneModel()))
    server = Server(app)
    engine = await asyncio.start_unix_server(Engine(trace).serve, socket)
    running = asyncio.get_running_loop().create_task(router.run())
    await server.start()
    url = f"{server.url}/v1/chat/completions"
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {_KEY}"}) as client:

        async def post(messages: list[dict[str, str]]) -> None:
            body = {"model": "chat", "messages": messages, "stream": True}
            async with client.post(url, json=body) as response:
                answer = await response.read()
                assert answer.endswith(b"data: [DONE]\n\n"), answer  # noqa: S101 (a trace of that)
            await asyncio.sleep(0.05)  # the proxy's work after the last byte

        yield post
    await server.close()
    running.cancel()
    engine.close()


async def _trace(*, is_sampled: bool) -> Trace:
    first = [{"role": "user", "content": "Say hello."}]
    more = [{"role": "assistant", "content": "Hi there"}, first[0]]
    trace = Trace()
    # However slow this machine is, no later request is sampled, or each that comes after the pause.
    pause_min_s = _SAMPLE_PAUSE_S / 2 if is_sampled else math.inf
    with (
        tempfile.TemporaryDirectory() as directory,
        patch.object(estimator, "_PAUSE_MIN_S", pause_min_s),
    ):
        async with _proxy(Path(directory), trace) as post:
            await post(first)
            await post([*first, *more])
            await asyncio.sleep(_SAMPLE_PAUSE_S if is_sampled else 0.0)
            trace.phase = "until the engine has it"
            with trace, patch.object(socket.socket, "send", partialmethod(_send, trace)):
                await post([*first, *more, *more])
    return trace


def main() -> None:
    trace = asyncio.run(_trace(is_sampled="--sampled" in sys.argv))
    print("\n".join(trace.lines()))
    files = {_path(code) for code in trace.entered}
    parts = ", ".join(f"{calls} {phase}" for phase, calls in trace.calls.items())
    print(f"{trace.calls.total()} calls: {parts}")
    print(
        f"{len(trace.entered)} functions in {len(files)} files; {len(trace.steps)} steps, "
        f"{trace.package_changes} changes of package"
    )


if __name__ == "__main__":
    main()
