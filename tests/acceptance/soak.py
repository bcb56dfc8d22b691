"""Load a daemon for long: with engines that are killed, or with very many requests.

    soak kills     8 clients stream from two models while engines get SIGKILL and settings are
                   reloaded; counts answers that were whole, cancelled and lost
    soak memory    8 clients send short and long chats, further turns, streams and what is refused
                   to an engine that computes nothing (or, with --real, to llama-server with a tiny
                   model); prints the daemon's memory and, with --trace, its largest holders

Exit code 1 if more than 2 requests are lost in 20 kills, or any with two replicas; or if the
samples of the daemon's memory in the second half are not within 5 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import http.client
import itertools
import json
import math
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar, Final, cast

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import psutil  # noqa: E402 (found by the line above, as those after it)
import uvloop  # noqa: E402
from acceptance.reload_under_load import TOKENS, flaw, make_model, stream  # noqa: E402
from support import tiny_gguf  # noqa: E402
from support.corral_cli import CorralCli, until  # noqa: E402
from support.engine_program import engine_program  # noqa: E402

from supervisor.cli.app import main as corral_main  # noqa: E402

CLIENTS: Final = 8
MODELS: Final = ("first", "second")
CTX_SIZES: Final = (2048, 4096)
LOST_MAX_PER_KILL: Final = 2 / 20
# So many of the clients leave before the end.
CANCELLED_SHARE: Final = 0.2
SPREAD_MAX_MB: Final = 5.0
HOLDERS: Final = 20
SAMPLES: Final = 20
TRACE_FILE: Final = "SOAK_TRACE_FILE"
MB: Final = 1e6
SLOTS: Final = 4
# Of the engine that computes nothing.
PARALLEL: Final = f"flags = {{ parallel = {SLOTS}, ctx-size = 16384 }}"


@dataclass
class Counts:
    """The outcome of the requests of all clients; `lost` has a reason for each."""

    whole: int = 0
    cancelled: int = 0
    lost: list[str] = field(default_factory=list)


def main() -> int:
    if sys.argv[1:] == ["daemon"]:
        return traced_daemon()
    if sys.argv[1:2] == ["engine"]:
        return scripted_engine(Path(sys.argv[sys.argv.index("--host") + 1]))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parts = parser.add_subparsers(dest="part", required=True)
    kills = parts.add_parser("kills", help="kill engines under load")
    kills.add_argument("--minutes", type=float, default=8)
    kills.add_argument("--kills", type=int, default=22, help="engines killed, evenly spread")
    kills.add_argument("--reloads", type=int, default=10, help="reloads, evenly spread")
    kills.add_argument("--replicas", type=int, default=1, help="of each model")
    memory = parts.add_parser("memory", help="send many requests")
    memory.add_argument("--requests", type=int, default=100_000)
    memory.add_argument("--trace", action="store_true", help="name the largest holders")
    memory.add_argument("--real", action="store_true", help="on llama-server: 5 times as long")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="corral-") as home:
        corral = CorralCli(Path(home))
        try:
            if options.part == "kills":
                return soak_kills(corral, options)
            return soak_memory(corral, options)
        finally:
            corral.end()


# Kills.


def soak_kills(corral: CorralCli, options: argparse.Namespace) -> int:
    path = make_model(corral.root / "alphabet.gguf")
    configure(corral, path, options.replicas, CTX_SIZES[0])
    corral.ok("start")
    counts, is_over = Counts(), threading.Event()
    port = int(corral.url.rpartition(":")[2])
    with ThreadPoolExecutor(CLIENTS) as clients:
        running = [
            clients.submit(ask_often, port, MODELS[number % 2], counts, is_over)
            for number in range(CLIENTS)
        ]
        try:
            killed = disturb(corral, path, options)
        finally:
            is_over.set()
        for client in running:
            client.result()
    allowed = 0 if options.replicas > 1 else math.floor(LOST_MAX_PER_KILL * killed)
    print(
        f"{killed} kills, {options.reloads} reloads, {options.replicas} replicas: "
        f"{counts.whole} whole, {counts.cancelled} cancelled, {len(counts.lost)} lost "
        f"(at most {allowed})"
    )
    for reason, count in Counter(counts.lost).most_common(10):
        print(f"  {count} x {reason}")
    return int(len(counts.lost) > allowed)


def configure(corral: CorralCli, path: Path, replicas: int, ctx_size: int) -> None:
    model = '[models.{}]\npath = "{}"\nreplicas = {}\nflags = {{ ctx-size = {} }}\n'
    sizes = (ctx_size, CTX_SIZES[0])
    tables = zip(MODELS, sizes, strict=True)
    corral.configure("".join(model.format(name, path, replicas, size) for name, size in tables))


def disturb(corral: CorralCli, path: Path, options: argparse.Namespace) -> int:
    """Kill and reload by a timetable, which decides nothing; return how many were killed."""
    total_s = 60 * options.minutes
    kill_s = [total_s * (number + 1) / (options.kills + 1) for number in range(options.kills)]
    reload_s = [total_s * (number + 0.5) / options.reloads for number in range(options.reloads)]
    plan = sorted([*((at_s, True) for at_s in kill_s), *((at_s, False) for at_s in reload_s)])
    began_at_s, killed, reloads = time.monotonic(), 0, itertools.count(1)
    for at_s, is_kill in [*plan, (total_s, False)]:
        time.sleep(max(0.0, began_at_s + at_s - time.monotonic()))
        if is_kill:
            pids = [
                instance.pid
                for instance in corral.instances().values()
                if instance.state == "ready"
            ]
            if pids and (pid := random.choice(pids)):  # noqa: S311 (no secret)
                os.kill(pid, signal.SIGKILL)
                killed += 1
        elif at_s < total_s:
            configure(corral, path, options.replicas, CTX_SIZES[next(reloads) % 2])
            corral("reload")
    return killed


def ask_often(port: int, model: str, counts: Counts, is_over: threading.Event) -> None:
    while not is_over.is_set():
        is_patient = random.random() > CANCELLED_SHARE  # noqa: S311 (no secret)
        chunks: list[str] = []
        try:
            for chunk in stream(port, model):
                chunks.append(chunk)
                if not is_patient and len(chunks) > TOKENS // 2:
                    break
        except (OSError, http.client.HTTPException, RuntimeError) as error:
            counts.lost.append(f"{model}: {error!r}")
            continue
        if not is_patient:
            counts.cancelled += 1
        elif wrong := _error_of(chunks) or flaw(chunks):
            counts.lost.append(f"{model}: {wrong}")
        else:
            counts.whole += 1


def _error_of(chunks: list[str]) -> str | None:
    return next((chunk for chunk in chunks if chunk.startswith('{"error"')), None)


# Memory.


def soak_memory(corral: CorralCli, options: argparse.Namespace) -> int:
    path, requests = tiny_gguf.make(corral.root / "tiny.gguf"), options.requests
    engine = "" if options.real else f'engine = "{write_engine(corral.root)}"\n'
    corral.configure(f'[models.tiny]\npath = "{path}"\n{engine}{PARALLEL}\n')
    trace = corral.root / "trace.txt"
    if options.trace:
        env = {**corral.env, TRACE_FILE: str(trace)}
        argv, quiet = [sys.executable, __file__, "daemon"], subprocess.DEVNULL
        psutil.Popen(argv, env=env, cwd=corral.root, stdout=quiet, stderr=quiet)
        until(corral.is_running)
    corral.ok("start")
    daemon = psutil.Process(corral.daemon_pid)
    port, numbers = int(corral.url.rpartition(":")[2]), itertools.count()
    sizes_mb: list[float] = []
    for part in range(SAMPLES):
        ask_all(port, numbers, requests * (part + 1) // SAMPLES - requests * part // SAMPLES)
        sizes_mb.append(daemon.memory_info().rss / MB)
        print(f"{requests * (part + 1) // SAMPLES:>8} requests: {sizes_mb[-1]:.1f} MB", flush=True)
        if options.trace and part + 1 in {SAMPLES // 2, SAMPLES}:
            print(holders(daemon, trace), flush=True)
    second_half_mb = sizes_mb[SAMPLES // 2 - 1 :]
    spread_mb = max(second_half_mb) - min(second_half_mb)
    print(f"within {spread_mb:.1f} MB in the second half (at most {SPREAD_MAX_MB:g})")
    return int(spread_mb > SPREAD_MAX_MB)


def ask_all(port: int, numbers: Iterator[int], count: int) -> None:
    def ask(share: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        for number in itertools.islice(numbers, share):
            path, body, expected = request_of(number)
            headers = {"Content-Type": "application/json", "X-Request-Id": f"soak-{number}"}
            connection.request("POST", path, json.dumps(body), headers)
            response = connection.getresponse()
            content = response.read()
            if response.status != expected:
                raise RuntimeError(f"{path}: {response.status}: {content[:300]!r}")
        connection.request("GET", "/metrics")
        connection.getresponse().read()
        connection.close()

    with ThreadPoolExecutor(CLIENTS) as clients:
        list(clients.map(ask, [count // CLIENTS] * CLIENTS))


def request_of(number: int) -> tuple[str, dict[str, Any], HTTPStatus]:
    """Return path, body and expected status of a request; nine in ten begin conversations."""
    chat: dict[str, Any] = {"model": "tiny", "max_tokens": 1, "user": f"user {number}"}
    chat["messages"] = [{"role": "user", "content": f"conversation {number} begins"}]
    match number % 10:
        case 5:  # the second turn of the last
            chat["messages"][0]["content"] = f"conversation {number - 1} begins"
            chat["messages"] += [
                {"role": "assistant", "content": "a"},
                {"role": "user", "content": "go on"},
            ]
        case 6:
            chat["stream"] = True
        case 7:
            chat["messages"].insert(0, {"role": "system", "content": f"be {number}; " * 200})
        case 8:
            return "/v1/chat/completions", chat | {"model": number}, HTTPStatus.BAD_REQUEST
        case 9:
            return "/v1/chat/completions", chat | {"model": f"none {number}"}, HTTPStatus.NOT_FOUND
    return "/v1/chat/completions", chat, HTTPStatus.OK


def holders(daemon: psutil.Process, trace: Path) -> str:
    trace.unlink(missing_ok=True)
    daemon.send_signal(signal.SIGUSR2)
    until(trace.exists)
    return trace.read_text("utf-8")


def traced_daemon() -> int:
    """Serve in this process; write the largest holders on SIGUSR2."""
    tracemalloc.start()
    path = Path(os.environ[TRACE_FILE])

    def write(*_: object) -> None:
        snapshot = tracemalloc.take_snapshot()
        statistics = snapshot.statistics("lineno")[:HOLDERS]
        counts = Counter(type(found).__qualname__ for found in gc.get_objects())
        lines = [f"    {holder}" for holder in statistics]
        lines += [f"    {count:>8} x {name}" for name, count in counts.most_common(HOLDERS)]
        partial = path.with_suffix(".partial")
        partial.write_text("\n".join(lines), "utf-8")
        partial.replace(path)

    signal.signal(signal.SIGUSR2, write)
    sys.argv = ["corral", "serve"]
    run: Callable[[], object] = corral_main
    run()
    return 0


# The engine that computes nothing: llama-server would take most of the time of a soak.


def write_engine(directory: Path) -> Path:
    """Write a program that says what it is as llama-server does, and serves as `ScriptedEngine`."""
    path, own = directory / "llama-server", shlex.join([sys.executable, __file__, "engine"])
    program = engine_program(10434).removesuffix(b"esac\n")
    path.write_bytes(program + f'*) exec {own} "$@";;\nesac\n'.encode())
    path.chmod(0o700)
    return path


def scripted_engine(address: Path) -> int:
    """Serve on a unix socket until standard input ends."""

    async def serve() -> None:
        loop, is_over = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(sys.stdin.fileno(), is_over.set)  # its end, or the line that says so
        async with await loop.create_unix_server(ScriptedEngine, str(address)):
            print('cmd_child_to_router:state:{"state":"ready","payload":{}}', flush=True)
            await is_over.wait()

    uvloop.run(serve())
    return 0


class ScriptedEngine(asyncio.Protocol):
    """A connection. A token is four bytes of a request; none is found in a cache."""

    tasks: ClassVar = itertools.count(1)
    prompt_tokens: ClassVar = 0
    decoded_tokens: ClassVar = 0
    # The last task of each slot, and its tokens; the slot used longest ago first.
    slots: ClassVar = dict.fromkeys(range(SLOTS), (-1, 0))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, blank, body = self._received.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: *(\d+)", head.lower())
        if not blank or len(body) < int(length[1] if length else 0):
            return
        path, has_key = head.split(b" ", 2)[1], b"\r\nauthorization:" in head.lower()
        status = 200 if has_key or path == b"/health" else 401
        kind, content = self._answer(path, body) if status == 200 else (b"text/plain", b"no key")
        size = b"Content-Length: %d\r\nConnection: close" % len(content)
        lines = (b"HTTP/1.1 %d OK" % status, b"Content-Type: " + kind, size, b"", content)
        self._transport.write(b"\r\n".join(lines))
        self._transport.close()

    def _answer(self, path: bytes, body: bytes) -> tuple[bytes, bytes]:
        cls, json_type = type(self), b"application/json"
        match path:
            case b"/v1/chat/completions":
                return b"text/event-stream", self._chat(json.loads(body))
            case b"/metrics":
                counters = b"llamacpp:prompt_tokens_total %d\nllamacpp:tokens_predicted_total %d\n"
                return b"text/plain", counters % (cls.prompt_tokens, cls.decoded_tokens)
            case b"/slots":
                slots = [
                    {"id": number, "id_task": task, "n_prompt_tokens": tokens, "n_ctx": 4096}
                    for number, (task, tokens) in sorted(cls.slots.items())
                ]
                return json_type, json.dumps(slots).encode()
            case b"/props":
                return json_type, b'{"total_slots":%d}' % SLOTS
        return json_type, b'{"content":"a","status":"ok"}'

    def _chat(self, request: dict[str, Any]) -> bytes:
        cls, tokens = type(self), max(1, len(json.dumps(request["messages"])) // 4)
        slot = request.get("id_slot", next(iter(cls.slots)))
        del cls.slots[slot]
        cls.slots[slot] = next(cls.tasks), tokens
        cls.prompt_tokens += tokens
        cls.decoded_tokens += 1
        timings: dict[str, float] = {"cache_n": 0, "prompt_n": tokens, "predicted_n": 1}
        timings |= {"prompt_ms": 1.0, "predicted_ms": 1.0}
        delta = {"role": "assistant", "content": "a"}
        usage = {"prompt_tokens": tokens, "completion_tokens": 1, "total_tokens": tokens + 1}
        common = {"object": "chat.completion.chunk", "id": "1", "created": 1, "model": "tiny"}
        first = {"index": 0, "delta": delta, "finish_reason": None}
        last = {"index": 0, "delta": {}, "finish_reason": "stop"}
        events = (
            common | {"choices": [first]},
            common | {"choices": [last], "usage": usage, "timings": timings},
        )
        return b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events) + (
            b"data: [DONE]\n\n"
        )


if __name__ == "__main__":
    sys.exit(main())
