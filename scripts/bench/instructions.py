"""Count the instructions that one request costs the proxy, with valgrind's callgrind.

The fake engine and the client of `overhead`, one connection, some hundred requests after a warm-up.
A token's count is that of a long response, whose chunks arrive one by one, without its beginning.
Neither the collector of cyclic garbage nor the estimator runs, which work by the clock; so counts
differ by less than 1 % between runs, also on a busy machine, where times say nothing. They are of
the user space alone: the kernel's work for a request is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from scripts.bench import overhead_load as load
from scripts.bench.overhead_fronts import free_port

_HERE: Final = Path(__file__).resolve().parents[2]
_WARM_UP: Final = 150
_STREAM_TOKENS: Final = 8
# Long streams: the pause is long enough that no two chunks arrive at once.
_LONG_TOKENS: Final = 200
_LONG_REQUESTS: Final = 20
_PAUSE_US: Final = 4_000
_START_TIMEOUT_S: Final = 120
_MOST: Final = 1.01
_FRONT: Final = """
import gc
from proxy.router.estimator import Estimator
from scripts.bench import overhead_front
overhead_front.tune_gc = gc.disable
Estimator.is_due = property(lambda self: False)
overhead_front.main()
"""
_COLLECTED: Final = re.compile(r"Collected : (\d+)")


def main() -> int:
    """Print the counts; return 1 if a request costs more than in the other checkout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=300, help="of each kind")
    parser.add_argument("--against", type=Path, metavar="DIRECTORY", help="another checkout")
    options = parser.parse_args()
    if shutil.which("valgrind") is None:
        print("instructions needs valgrind: apt-get install valgrind", file=sys.stderr)
        return 2
    counts = _counts(_HERE, options.requests)
    others = _counts(options.against.resolve(), options.requests) if options.against else {}
    for name, count in counts.items():
        line = f"{name}: {count:,.0f} instructions"
        if others:
            line += f", {count / others[name]:.4f} times the {others[name]:,.0f} of the other"
        print(line)
    return int(any(counts[name] > _MOST * other for name, other in others.items()))


def _counts(checkout: Path, requests: int) -> dict[str, float]:
    """Return the instructions of one request of each kind, and of one token."""
    json = load.body(is_stream=False)
    short = load.body(is_stream=True, tokens=_STREAM_TOKENS)
    return {
        "JSON response": _count(checkout, requests, json),
        "stream of 8 tokens": _count(checkout, requests, short),
        "token of a long stream": _count_token(checkout, is_stream=True),
        "token of a long JSON response": _count_token(checkout, is_stream=False),
    }


def _count_token(checkout: Path, *, is_stream: bool) -> float:
    begun, long = (
        _count(
            checkout,
            _LONG_REQUESTS,
            load.body(is_stream=is_stream, tokens=tokens, pause_us=_PAUSE_US),
        )
        for tokens in (2, _LONG_TOKENS)
    )
    return (long - begun) / (_LONG_TOKENS - 2)


def _count(checkout: Path, requests: int, content: bytes) -> float:
    """Return the instructions of one request, on average."""
    with tempfile.TemporaryDirectory(prefix="corral-") as directory:
        home = Path(directory)
        with _engine(home) as engine, _front(checkout, home, engine) as (front, port):
            asyncio.run(_measure(front, port, content, requests))
        found = _COLLECTED.search((home / "front.log").read_text("utf-8"))
    if found is None:
        raise SystemExit(f"valgrind counted nothing for {checkout}")
    return int(found[1]) / requests


async def _measure(front: int, port: int, content: bytes, requests: int) -> None:
    await load.sequential(port, content, min(_WARM_UP, requests))
    _switch("on", front)
    await load.sequential(port, content, requests)
    _switch("off", front)


def _switch(state: str, front: int) -> None:
    words = ["callgrind_control", "-i", state, str(front)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@contextmanager
def _engine(home: Path) -> Iterator[Path]:
    """Run the fake engine; yield the socket on which it closes a connection after a stream."""
    path = home / "engine.sock"
    module = [sys.executable, "-m", "scripts.bench.overhead_engine"]
    sockets = ["--socket", str(path), "--kept-socket", str(home / "kept.sock")]
    engine = subprocess.Popen([*module, *sockets], cwd=_HERE, stdout=subprocess.DEVNULL)
    try:
        yield path
    finally:
        engine.kill()
        engine.wait()


@contextmanager
def _front(checkout: Path, home: Path, engine: Path) -> Iterator[tuple[int, int]]:
    """Run the proxy of a checkout below valgrind; yield its process and its port."""
    port = free_port()
    tool = [
        "valgrind",
        "--tool=callgrind",
        "--instr-atstart=no",
        f"--callgrind-out-file={home}/out",
    ]
    words = ["-c", _FRONT, "--socket", str(engine), "--port", str(port)]
    with (home / "front.log").open("wb") as log:
        front = subprocess.Popen(
            [*tool, sys.executable, *words],
            cwd=checkout,
            # Sets of names are read in the same order each time.
            env={**os.environ, "PYTHONPATH": str(checkout), "PYTHONHASHSEED": "0"},
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
        try:
            _await_port(port, front)
            yield front.pid, port
        finally:
            front.send_signal(signal.SIGINT)
            try:
                front.wait(_START_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                front.kill()


def _await_port(port: int, front: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < until_s and front.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise SystemExit("the proxy did not start below valgrind")


if __name__ == "__main__":
    sys.exit(main())
