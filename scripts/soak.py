"""Load a daemon for long: with engines that are killed, or with very many requests.

    soak kills     8 clients stream from two models while engines get SIGKILL and settings are
                   reloaded; counts answers that were whole, cancelled and lost
    soak memory    8 clients send short chats, each of a conversation of its own, to a tiny model;
                   prints the daemon's memory and, with --trace, its largest holders

Exit code 1 if more than 2 requests are lost in 20 kills, or any with two replicas; or if the
daemon's memory grows by more than 5 MB in the second half.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import math
import os
import random
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
from pathlib import Path
from typing import Final

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import psutil  # noqa: E402 (found by the line above, as those after it)
import tiny_gguf  # noqa: E402
from corral_cli import CorralCli, until  # noqa: E402

from scripts.reload_under_load import TOKENS, flaw, make_model, stream  # noqa: E402
from supervisor.cli import main as corral_main  # noqa: E402

CLIENTS: Final = 8
MODELS: Final = ("first", "second")
CTX_SIZES: Final = (2048, 4096)
LOST_MAX_PER_KILL: Final = 2 / 20
# So many of the clients leave before the end.
CANCELLED_SHARE: Final = 0.2
GROWTH_MAX_MB: Final = 5.0
HOLDERS: Final = 15
SAMPLES: Final = 20
TRACE_FILE: Final = "SOAK_TRACE_FILE"
MB: Final = 1e6


@dataclass
class Counts:
    """What became of the requests of all clients; `lost` has a reason for each."""

    whole: int = 0
    cancelled: int = 0
    lost: list[str] = field(default_factory=list)


def main() -> int:
    if sys.argv[1:] == ["daemon"]:
        return traced_daemon()
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
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="corral-") as home:
        corral = CorralCli(Path(home))
        try:
            if options.part == "kills":
                return soak_kills(corral, options)
            return soak_memory(corral, options.requests, is_traced=options.trace)
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
            pids = [one["pid"] for one in corral.instances().values() if one["state"] == "ready"]
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


def soak_memory(corral: CorralCli, requests: int, *, is_traced: bool) -> int:
    path = tiny_gguf.make(corral.root / "tiny.gguf")
    corral.configure(f'[models.tiny]\npath = "{path}"\nflags = {{ parallel = 4 }}\n')
    trace = corral.root / "trace.txt"
    if is_traced:
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
        if is_traced and part + 1 in {SAMPLES // 2, SAMPLES}:
            print(holders(daemon, trace), flush=True)
    growth_mb = sizes_mb[-1] - sizes_mb[SAMPLES // 2 - 1]
    print(f"grown by {growth_mb:.1f} MB in the second half (at most {GROWTH_MAX_MB:g})")
    return int(growth_mb > GROWTH_MAX_MB)


def ask_all(port: int, numbers: Iterator[int], count: int) -> None:
    def ask(share: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        for _ in range(share):
            words = f"conversation {next(numbers)} begins"
            messages = [{"role": "user", "content": words}]
            body = json.dumps({"model": "tiny", "messages": messages, "max_tokens": 1})
            connection.request(
                "POST", "/v1/chat/completions", body, {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise RuntimeError(f"{response.status}: {response.read()[:300]!r}")
            response.read()

    with ThreadPoolExecutor(CLIENTS) as clients:
        list(clients.map(ask, [count // CLIENTS] * CLIENTS))


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
        statistics = tracemalloc.take_snapshot().statistics("lineno")
        lines = [f"    {holder}" for holder in statistics[:HOLDERS]]
        partial = path.with_suffix(".partial")
        partial.write_text("\n".join(lines), "utf-8")
        partial.replace(path)

    signal.signal(signal.SIGUSR2, write)
    sys.argv = ["corral", "serve"]
    run: Callable[[], object] = corral_main
    run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
