"""Serve the demo model and stream one answer into the terminal, token by token."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODEL = "smollm2"
PROMPT = "Tell me in three sentences why llamas make good neighbours."
CORRAL = Path(sys.executable).with_name("corral")


def main() -> int:
    """Stream one answer, then serve until Ctrl-C; with --once stop at once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--once", action="store_true", help="stop after one answer")
    once = parser.parse_args().once
    with tempfile.TemporaryDirectory(prefix="corral-") as runtime:
        # The demo does not use the user's own daemon.
        os.environ["CORRAL_RUNTIME_DIR"] = runtime
        run(Path(runtime), once=once)
    return 0


def run(runtime: Path, *, once: bool) -> None:
    corral("model", "get", MODEL)
    corral("start", MODEL, "--listen", "127.0.0.1:0")
    try:
        answer(base_url(runtime))
        corral("status")
        if not once:
            serve_until_interrupted()
    except KeyboardInterrupt:
        print()
    finally:
        corral("stop")


def corral(*words: str) -> None:
    """Show and run a corral command; exit if it fails."""
    print(f"\n$ corral {' '.join(words)}", flush=True)
    result = subprocess.run([CORRAL, *words], check=False)
    if result.returncode:
        raise SystemExit(result.returncode)


def base_url(runtime: Path) -> str:
    url: str = json.loads((runtime / "daemon.json").read_text("utf-8"))["url"]
    return url


def answer(url: str) -> None:
    """Send PROMPT, print the answer as it arrives, and its timings."""
    print(f"\n> {PROMPT}\n", flush=True)
    sent_at_s = time.monotonic()
    first_token_s = None
    timings: dict[str, Any] = {}
    for chunk in stream(url):
        for choice in chunk["choices"]:
            text = choice["delta"].get("content") or ""
            if text and first_token_s is None:
                first_token_s = time.monotonic() - sent_at_s
            print(text, end="", flush=True)
        timings = chunk.get("timings", timings)
    print(
        f"\n\nfirst token after {(first_token_s or 0) * 1000:.0f} ms, "
        f"{timings['predicted_n']} tokens at {timings['predicted_per_second']:.1f} tokens/s"
    )


def stream(url: str) -> Iterator[dict[str, Any]]:
    """Yield the chunks of one streamed chat completion."""
    messages = [{"role": "user", "content": PROMPT}]
    body = {"model": MODEL, "stream": True, "max_tokens": 120, "messages": messages}
    request = urllib.request.Request(  # noqa: S310 (the daemon's own loopback address)
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as response:  # noqa: S310 (as above)
        for line in response:
            data = line.removeprefix(b"data: ").strip()
            if line.startswith(b"data: ") and data != b"[DONE]":
                yield json.loads(data)


def serve_until_interrupted() -> None:
    print("\nserving; Ctrl-C stops", flush=True)
    signal.pause()


if __name__ == "__main__":
    # SIGTERM ends the demo as Ctrl-C does, so that the daemon is stopped either way.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
