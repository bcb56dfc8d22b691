"""Three machines behind a DNS name, a front with its own model, and clients that stream.

The machines are daemons on 127.0.0.2 to 4 with real engines, dnsmasq has their records. Records are
added and removed, the name vanishes, one machine is killed, one drained, all are restarted one
after the other. Each answer must be whole; only an answer of the killed machine may end early, with
an error event. Exits with 1 after any deviation.
"""

from __future__ import annotations

import argparse
import functools
import http.client
import json
import secrets
import signal
import socket
import string
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support import tiny_gguf  # noqa: E402 (found by the line above, as those after it)
from support.corral_cli import CorralCli, Daemon  # noqa: E402

NAME = "corral.test"
HOSTS = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
TOKENS = 300
PATIENCE_S = 120
MODEL = """
[models.chat]
path = "{path}"
flags = {{ parallel = 4, threads = 1, ctx-size = 8192 }}
[proxy]
listen = "{host}:{port}"
allowed_hosts = ["{host}"]
"""
NODES = """
[nodes.pods]
url = "dns+http://{name}:{port}"
resolver = "127.0.0.1:{dns_port}"
local_first = false
"""


@dataclass
class Phase:
    """The answers that began in a phase, by outcome; those of note are kept.

    `history_tokens` are those of earlier turns, of which `found_tokens` were in a cache.
    """

    name: str
    outcomes: Counter[str] = field(default_factory=Counter)
    nodes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    took_s: float = 0.0
    history_tokens: int = 0
    found_tokens: int = 0


@dataclass(frozen=True)
class Answer:
    """An answer; `outcome` is "whole", "error event" or the fault."""

    node: str
    outcome: str
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0


class NameServer:
    """dnsmasq with one name."""

    def __init__(self, directory: Path, name: str = NAME, address: str = "127.0.0.1") -> None:
        # The address may come later.
        self.port = free_port("127.0.0.1")
        self._name = name
        self.address = address
        self._hosts = directory / "hosts"
        self._process: subprocess.Popen[bytes] | None = None

    @contextmanager
    def running(self, *hosts: str) -> Iterator[None]:
        self._write(hosts)
        options = ("--no-resolv", "--no-hosts", "--bind-interfaces", f"--local=/{self._name}/")
        self._process = subprocess.Popen(
            [  # noqa: S607 (wherever it is installed)
                "dnsmasq",
                "--keep-in-foreground",
                "--conf-file=/dev/null",
                "--pid-file=",
                *options,
                f"--listen-address={self.address}",
                f"--port={self.port}",
                f"--addn-hosts={self._hosts}",
                "--user=root",
            ]
        )
        try:
            yield
        finally:
            self._process.terminate()
            self._process.wait()

    def set(self, *hosts: str) -> None:
        self._write(hosts)
        if self._process:
            self._process.send_signal(signal.SIGHUP)

    def _write(self, hosts: Iterable[str]) -> None:
        self._hosts.write_text("".join(f"{host} {self._name}\n" for host in hosts), "utf-8")


class Clients:
    """Stream without a pause, each one answer after the other: conversations of so many turns."""

    def __init__(self, host: str, port: int, count: int, turns: int = 1) -> None:
        self.phase = Phase("start")
        self.killed = ""
        self._address = host, port
        self._turns = turns
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(count)]

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            for thread in self._threads:
                thread.join()

    def _run(self) -> None:
        messages: list[dict[str, str]] = []
        history_tokens = 0
        while not self._is_over.is_set():
            if len(messages) == 2 * self._turns:
                messages, history_tokens = [], 0
            if not messages and self._turns > 1:
                messages = [{"role": "user", "content": f"hello from {secrets.token_hex(16)}"}]
            elif len(messages) % 2 == 0:
                messages.append({"role": "user", "content": "hello"})
            phase = self.phase
            answer = ask(*self._address, messages)
            self._record(phase, answer)
            if answer.outcome == "whole":
                phase.history_tokens += history_tokens
                phase.found_tokens += min(answer.cached_tokens, history_tokens)
                history_tokens = answer.prompt_tokens + TOKENS
                messages.append({"role": "assistant", "content": answer.text})

    def _record(self, phase: Phase, answer: Answer) -> None:
        outcome = answer.outcome
        if outcome == "error event" and self.killed and self.killed in answer.node:
            outcome = "killed"
        phase.outcomes[outcome] += 1
        phase.nodes[answer.node] += 1
        if outcome not in {"whole", "killed"}:
            phase.problems.append(f"{phase.name}: {answer.node}: {outcome}")


def ask(host: str, port: int, messages: Sequence[Mapping[str, str]]) -> Answer:
    body = {
        "model": "chat",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": TOKENS,
        "temperature": 0,
        "messages": messages,
    }
    connection = http.client.HTTPConnection(host, port, timeout=PATIENCE_S)
    node = "-"
    chunks: list[str] = []
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        node = response.headers.get("X-Corral-Instance", "-")
        if response.status != http.client.OK:
            return Answer(node, f"failed: {response.status} {response.read()[:200]!r}")
        chunks.extend(
            line.removeprefix(b"data: ").strip().decode()
            for line in response
            if line.startswith(b"data: ")
        )
    except (OSError, http.client.HTTPException) as error:
        if not chunks:
            return Answer(node, f"failed: {error!r}")
    finally:
        connection.close()
    return answer_of(node, chunks)


def answer_of(node: str, chunks: Sequence[str]) -> Answer:
    if chunks and chunks[-1].startswith("{") and "error" in json.loads(chunks[-1]):
        return Answer(node, "error event")
    if not chunks or chunks[-1] != "[DONE]":
        return Answer(node, f"truncated: ends with {chunks[-1:]}")
    parsed: list[dict[str, Any]] = [json.loads(chunk) for chunk in chunks[:-1]]
    deltas = [choice["delta"] for chunk in parsed for choice in chunk.get("choices", ())]
    text = "".join(delta.get("content") or "" for delta in deltas)
    whole = string.ascii_lowercase * (TOKENS // 26 + 2)
    if len(text) != TOKENS or text not in whole:
        return Answer(node, f"truncated: {text!r}")
    usage = parsed[-1]["usage"]
    cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    return Answer(node, "whole", text, usage["prompt_tokens"], cached_tokens)


class Story:
    """Things that happen to machines while clients stream."""

    def __init__(self, answers: int = 32, interval_s: float = 0.1) -> None:
        self.phases: list[Phase] = []
        self._answers = answers
        self._interval_s = interval_s

    clients: Clients

    def up(self) -> set[str]:
        """Return the machines to which the front sends requests."""
        raise NotImplementedError

    def phase(self, name: str, do: Callable[[], object], up: set[str]) -> None:
        """Do something, wait for its effect, and let it stand for some answers."""
        phase = Phase(name)
        self.phases.append(phase)
        began_at_s = time.monotonic()
        self.clients.phase = phase
        do()
        self.wait(lambda: self.up() == up, f"{name}: {up} up", phase)
        phase.took_s = time.monotonic() - began_at_s
        done = phase.outcomes["whole"]
        self.wait(
            lambda: phase.outcomes["whole"] >= done + self._answers, f"{name}: answers", phase
        )
        print(f"{name}: {phase.took_s:.1f} s", file=sys.stderr)

    def wait(self, is_so: Callable[[], bool], what: str, phase: Phase) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not is_so():
            if time.monotonic() > until_s:
                phase.problems.append(f"not in {PATIENCE_S} s: {what}")
                return
            time.sleep(self._interval_s)


class Machines(Story):
    """The front, the machines, and the events that happen to them."""

    def __init__(self, home: Path, names: NameServer, clients: int) -> None:
        super().__init__()
        model = tiny_gguf.make(
            home / "alphabet.gguf", mode="cycle", embd=128, heads=4, layers=4, ff=256, ctx=8192
        )
        self._names = names
        self._port = free_port(*HOSTS, "127.0.0.1")
        self._machines = {host: self._corral(home / host, host, model) for host in HOSTS}
        self._front = self._corral(home / "front", "127.0.0.1", model, NODES)
        self._daemons: dict[str, Daemon] = {}
        self._clients = clients

    def _corral(self, home: Path, host: str, model: Path, more: str = "") -> CorralCli:
        home.mkdir()
        corral = CorralCli(home)
        text = MODEL.format(path=model, host=host, port=self._port)
        dns_port = self._names.port
        corral.configure(text + more.format(name=NAME, port=self._port, dns_port=dns_port))
        return corral

    def run(self) -> None:
        try:
            for host, machine in self._machines.items():
                self._daemons[host] = machine.serve()
            self._front.serve()
            self.clients = Clients("127.0.0.1", self._port, self._clients)
            with self.clients.running():
                self._happen()
        finally:
            for corral in (*self._machines.values(), self._front):
                corral.end()

    def _happen(self) -> None:
        one, two, three = HOSTS
        self.phase("records added", lambda: self._records(one), {one})
        self.phase("more added", lambda: self._records(*HOSTS), {*HOSTS})
        self.phase("record removed", lambda: self._records(one, two), {one, two})
        self.phase("NXDOMAIN", self._records, set())
        self.phase("records back", lambda: self._records(*HOSTS), {*HOSTS})
        self.phase("one killed", lambda: self._kill(two), {one, three})
        self.phase("started again", lambda: self._start(two), {*HOSTS})
        self.phase("one drained", lambda: self._stop(three), {one, two})
        self.phase("started again", lambda: self._start(three), {*HOSTS})
        for host in HOSTS:
            self.phase(f"restart of {host}", functools.partial(self._restart, host), {*HOSTS})

    def up(self) -> set[str]:
        nodes = self._front.status().nodes
        return {node.name.partition("@")[2] for node in nodes if node.state == "up"}

    def _busy(self, host: str) -> int:
        nodes = self._front.status().nodes
        return sum(node.slots_busy for node in nodes if node.name.endswith(host))

    def _records(self, *hosts: str) -> None:
        self._names.set(*hosts)

    def _kill(self, host: str) -> None:
        """Kill a machine while it answers."""
        self.wait(lambda: self._busy(host) > 1, f"requests at {host}", self.clients.phase)
        self.clients.killed = host
        self._daemons[host].kill()
        self._daemons[host].wait()

    def _stop(self, host: str) -> None:
        self._machines[host].ok("stop")

    def _start(self, host: str) -> None:
        self._daemons[host] = self._machines[host].serve()
        self.clients.killed = ""

    def _restart(self, host: str) -> None:
        self._stop(host)
        self._start(host)


def free_port(*hosts: str) -> int:
    """Return a port that is free on all of these addresses."""
    while True:
        with socket.socket() as found:
            found.bind((hosts[0], 0))
            port: int = found.getsockname()[1]
            if all(is_free(host, port) for host in hosts[1:]):
                return port


def is_free(host: str, port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind((host, port))
        except OSError:
            return False
    return True


def show(phases: Sequence[Phase]) -> bool:
    """Print the table; return whether all is as it should be."""
    kinds = ("whole", "killed", "error event", "truncated", "failed")
    titles = (*kinds, "until seen", "found again")
    print(f"{'phase':22}" + "".join(f"{title:>13}" for title in titles))
    for phase in phases:
        counts = Counter[str]()
        for outcome, count in phase.outcomes.items():
            counts[outcome.partition(":")[0]] += count
        row = "".join(f"{counts[kind]:13}" for kind in kinds)
        found = phase.found_tokens / phase.history_tokens if phase.history_tokens else 0
        share = f"{found:.1%}" if phase.history_tokens else "-"
        print(f"{phase.name:22}{row}{phase.took_s:11.1f} s{share:>13}")
    problems = [problem for phase in phases for problem in phase.problems]
    for problem in problems[:20]:
        print(f"problem: {problem}")
    return not problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=16, help="streams at a time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="corral-") as home:
        names = NameServer(Path(home))
        with names.running():
            machines = Machines(Path(home), names, options.clients)
            machines.run()
    return 0 if show(machines.phases) else 1


if __name__ == "__main__":
    sys.exit(main())
