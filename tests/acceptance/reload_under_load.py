"""Reload one of two models repeatedly under load: no request may fail, no stream may be cut.

Clients stream without a pause, half of them from each model. Both models repeat the alphabet, so
that a lost or repeated token shows. Each reload changes a flag of one model: that one is replaced,
the other must keep its process. Exits with 1 after any deviation.
"""

from __future__ import annotations

import argparse
import http.client
import json
import string
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support import tiny_gguf  # noqa: E402 (found by the line above, as those after it)
from support.corral_cli import CorralCli  # noqa: E402

from scripts.bench.result import Figure, Result, one_round  # noqa: E402

CHANGED, KEPT = "changed", "kept"
CTX_SIZES = (2048, 4096)
TOKENS = 60
PATIENCE_S = 60
SETTINGS = """
[models.changed]
path = "{path}"
flags = {{ ctx-size = {ctx_size} }}

[models.kept]
path = "{path}"
"""


@dataclass
class Counts:
    """Results of the clients of one model.

    Attributes:
        whole: How many answers were complete and correct.
        failed: The reason of each request without an answer.
        truncated: The flaw of each incomplete or incorrect answer.
        slowest_s: The longest time of an answer.
    """

    whole: int = 0
    failed: list[str] = field(default_factory=list)
    truncated: list[str] = field(default_factory=list)
    slowest_s: float = 0.0


@dataclass
class Findings:
    """Results by model, the time of each reload, and the problems of reloads."""

    counts: dict[str, Counts]
    reloads_s: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def is_fine(self) -> bool:
        counts = self.counts.values()
        return not self.problems and not any(count.failed or count.truncated for count in counts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=8, help="streams at a time")
    parser.add_argument("--reloads", type=int, default=20, help="how many reloads")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="corral-") as home:
        model = make_model(Path(home) / "alphabet.gguf")
        corral = CorralCli(Path(home))
        try:
            findings = run(corral, model, clients=options.clients, reloads=options.reloads)
        finally:
            corral.end()
    show(findings)
    result(findings).write(options.json)
    return 0 if findings.is_fine else 1


def make_model(path: Path) -> Path:
    """Write a model that repeats the alphabet, and takes some tenths of a second for an answer."""
    return tiny_gguf.make(path, mode="cycle", embd=128, heads=4, layers=4, ff=256, ctx=8192)


def run(corral: CorralCli, model: Path, *, clients: int, reloads: int) -> Findings:
    """Stream from two or more clients at a time while reloading."""
    configure(corral, model, CTX_SIZES[0])
    corral.ok("start")
    findings = Findings({CHANGED: Counts(), KEPT: Counts()})
    is_over = threading.Event()
    port = int(corral.url.rpartition(":")[2])
    threads = [
        threading.Thread(target=stream_answers, args=(port, name, findings.counts[name], is_over))
        for name in [CHANGED, KEPT] * (clients // 2)
    ]
    for thread in threads:
        thread.start()
    try:
        for turn in range(1, reloads + 1):
            configure(corral, model, CTX_SIZES[turn % 2])
            reload_once(corral, findings, f"reload {turn}")
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    return findings


def configure(corral: CorralCli, model: Path, ctx_size: int) -> None:
    corral.configure(SETTINGS.format(path=model, ctx_size=ctx_size))


def reload_once(corral: CorralCli, findings: Findings, label: str) -> None:
    """Reload, and check that one process was replaced and the other was not."""
    before = pids(corral)
    began_at_s = time.monotonic()
    done = corral("reload", "--json")
    findings.reloads_s.append(time.monotonic() - began_at_s)
    if done.returncode != 0:
        findings.problems.append(f"{label}: {done.stdout}{done.stderr}")
        return
    after = pids(corral)
    if after[KEPT] != before[KEPT]:
        findings.problems.append(f"{label}: the other model was restarted")
    if after[CHANGED] == before[CHANGED]:
        findings.problems.append(f"{label}: the changed model was not replaced")


def pids(corral: CorralCli) -> dict[str, int]:
    """Return the pid of the ready instance of each model."""
    models = corral.data("status")["models"]
    return {
        model["name"]: instance["pid"]
        for model in models
        for instance in model["instances"]
        if instance["state"] == "ready"
    }


def stream_answers(port: int, model: str, counts: Counts, is_over: threading.Event) -> None:
    """Stream one answer after another and count the results."""
    while not is_over.is_set():
        began_at_s = time.monotonic()
        try:
            chunks = list(stream(port, model))
        except (OSError, http.client.HTTPException, RuntimeError) as error:
            counts.failed.append(repr(error))
            continue
        if wrong := flaw(chunks):
            counts.truncated.append(wrong)
        else:
            counts.whole += 1
        counts.slowest_s = max(counts.slowest_s, time.monotonic() - began_at_s)


def stream(port: int, model: str) -> Iterator[str]:
    """Yield the data of each event of one streamed answer.

    Raises:
        RuntimeError: The answer is an error.
        OSError, HTTPException: The connection broke.
    """
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": model, "stream": True, "max_tokens": TOKENS, "temperature": 0}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps({**body, "messages": messages}),
            {"Content-Type": "application/json"},
        )
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise RuntimeError(f"{response.status}: {response.read()[:300]!r}")
        for line in response:
            if line.startswith(b"data: "):
                yield line.removeprefix(b"data: ").strip().decode()
    finally:
        connection.close()


def flaw(chunks: Sequence[str]) -> str | None:
    if not chunks or chunks[-1] != "[DONE]":
        return f"ends with {chunks[-1:]}"
    parsed: list[dict[str, Any]] = [json.loads(chunk) for chunk in chunks[:-1]]
    deltas = [choice["delta"] for chunk in parsed for choice in chunk.get("choices", ())]
    text = "".join(delta.get("content") or "" for delta in deltas)
    alphabet = string.ascii_lowercase * (TOKENS // 26 + 2)
    if len(text) != TOKENS or text not in alphabet:
        return f"the text is {text!r}"
    return None


def result(findings: Findings) -> Result:
    counts = findings.counts
    failed, truncated = (
        {name: len(getattr(count, kind)) for name, count in counts.items()}
        for kind in ("failed", "truncated")
    )
    return Result(
        [
            one_round(
                "complete answers", "", {name: count.whole for name, count in counts.items()}
            ),
            one_round("failed requests", "", failed),
            one_round("truncated answers", "", truncated),
            one_round(
                "longest answer", "s", {name: count.slowest_s for name, count in counts.items()}
            ),
            Figure("reload", "s", {CHANGED: findings.reloads_s}),
        ],
        goals={
            f"no request fails ({sum(failed.values())})": not any(failed.values()),
            f"no answer is truncated ({sum(truncated.values())})": not any(truncated.values()),
            f"each reload replaces one process ({findings.problems[:1]})": not findings.problems,
        },
    )


def show(findings: Findings) -> None:
    print(f"{'model':10} {'whole':>7} {'failed':>7} {'truncated':>10} {'slowest':>9}")
    for name, counts in findings.counts.items():
        failed, truncated = len(counts.failed), len(counts.truncated)
        print(f"{name:10} {counts.whole:7} {failed:7} {truncated:10} {counts.slowest_s:7.2f} s")
    took = sorted(findings.reloads_s)
    print(f"\n{len(took)} reloads, median {took[len(took) // 2]:.2f} s, slowest {took[-1]:.2f} s")
    problems = [*findings.problems]
    for counts in findings.counts.values():
        problems += [*counts.failed, *counts.truncated]
    for problem in problems[:20]:
        print(f"problem: {problem}")


if __name__ == "__main__":
    sys.exit(main())
