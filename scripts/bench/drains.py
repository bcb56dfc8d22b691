"""Drain machines in turn, under load: how many tokens others compute again.

Three machines on loopback, each a llama-corral with one engine of one thread, share a directory of
slot files (`slots_directory`), or copy slot files from each other (`--files copied`); a front sends
turns to them. With `--mbit`, each machine has a network namespace, and the kernel limits the rate
of its network in both directions; that needs root. While the clients go on, each machine
is stopped, which drains it, and started again. Tokens come from the engines' `timings`. The time of
a first token is compared with that of computing the same prompt, at the speed of the first turns
of the conversations in this run.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from support import tiny_gguf
from support.corral_cli import CorralCli, until

from scripts.bench.conversations import Clients, Turn, TurnResult, Workload, WorkloadResult
from scripts.bench.result import Figure, Result
from supervisor.models import pinned
from supervisor.rpc.address import free_port
from supervisor.system.paths import directories

MACHINES: Final = 3
SLOTS: Final = 4
CTX: Final = 4096
WORKLOAD: Final = Workload(
    "drains",
    applications=0,
    system_words=600,
    conversations=30,
    turn_words=15,
    clients=6,
    turns=4,
    think_s=1.0,
)
COMPUTED_AGAIN_MAX: Final = 0.02
FIRST_TOKEN_MAX: Final = 0.2


@dataclass(frozen=True)
class Move:
    """A turn on another process than the turn before, whose slot held `history` tokens."""

    history: int
    turn: TurnResult

    @property
    def computed_again(self) -> int:
        return max(0, self.history - self.turn.cached)


def main() -> int:
    """Run the conversations, print the figures, and return 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=WORKLOAD.conversations)
    ways = ("shared", "copied", "private")
    parser.add_argument("--files", choices=ways, default="shared", help="how machines get files")
    parser.add_argument("--mbit", type=int, help="of the network of each machine; needs root")
    parser.add_argument("--tiny", action="store_true", help="use a random model of 270 kB")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    workload = replace(WORKLOAD, conversations=options.conversations)
    found = _result(*_run(workload, options.files, options.mbit, is_tiny=options.tiny))
    found.write(options.json)
    for figure in found.figures:
        print(f"{figure.name}: {figure.values} {figure.unit}")
    for note in found.notes:
        print(note)
    for goal in found.missed:
        print(f"missed: {goal}")
    return 1 if found.missed else 0


def _run(
    workload: Workload, files: str, mbit: int | None, *, is_tiny: bool
) -> tuple[WorkloadResult, Sequence[float]]:
    """Return the turns, and when each drain began; monotonic."""
    turns, drains, answered = workload.conversations * workload.turns, list[float](), [0]
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="corral-")))
        model = (
            tiny_gguf.make(home / "tiny.gguf", ctx=SLOTS * CTX)
            if is_tiny
            else pinned.find_pin("smollm2").path(directories().models)
        )
        store = {
            "shared": f'slots_directory = "{home / "slots"}"',
            "copied": "",
            "private": "slots_send_rate = 0",
        }
        tables = f"[supervisor]\n{store[files]}\n{_model_text(model)}"
        places = stack.enter_context(_network(mbit)) if mbit else dict.fromkeys(range(MACHINES))
        hosts = [f"10.213.7.{2 + number}" if mbit else "127.0.0.1" for number in places]
        urls = [f"http://{host}:{free_port()}" for host in hosts]
        machines = [
            _corral(stack, url, tables + _nodes_text({*urls} - {url}), namespace)
            for url, namespace in zip(urls, places.values(), strict=True)
        ]
        for machine in machines:
            machine.ok("start")
        front = _corral(stack, f"http://127.0.0.1:{free_port()}", _nodes_text(urls))
        front.ok("start")
        until(lambda: [node.state for node in front.status().nodes] == ["up"] * MACHINES)

        def note(count: int) -> None:
            answered[0] = count

        def drain() -> None:
            for number, machine in enumerate(machines, 1):
                share = number * turns // (MACHINES + 1)
                while answered[0] < share:
                    time.sleep(0.1)
                drains.append(time.monotonic())
                machine.ok("stop")
                machine.ok("start")

        url = front.url
        draining = threading.Thread(target=drain, daemon=True)
        draining.start()
        clients = Clients(lambda: url, lambda _: "chat", workload, seed=1, on_answer=note)
        result = asyncio.run(clients.run())
        draining.join()
    return result, drains


class _Machine(CorralCli):
    """Runs commands, and so its daemon, in a network namespace."""

    namespace: str | None = None

    def argv(self, *words: str) -> list[str]:
        inside = ["ip", "netns", "exec", self.namespace] if self.namespace else []
        return [*inside, *super().argv(*words)]


@contextmanager
def _network(mbit: int) -> Iterator[dict[int, str | None]]:
    """Make namespaces with an address each, 10.213.7.2 and more, behind a bridge."""
    bridge, names = "corral-bench", {number: f"corral-bench-{number}" for number in range(MACHINES)}
    limit = f"root tbf rate {mbit}mbit burst {max(1_000_000, 500 * mbit)} latency 50ms"
    with ExitStack() as ends:

        def run(words: str, undo: str = "") -> None:
            subprocess.run(words.split(), check=True)
            if undo:
                ends.callback(subprocess.run, undo.split(), check=False)

        run(f"ip link add {bridge} type bridge", f"ip link del {bridge}")
        run(f"ip addr add 10.213.7.1/24 dev {bridge}")
        run(f"ip link set {bridge} up")
        for number, name in names.items():
            run(f"ip netns add {name}", f"ip netns del {name}")
            run(f"ip link add cb{number} type veth peer name eth0 netns {name}")
            run(f"ip link set cb{number} master {bridge} up")
            run(f"ip -n {name} addr add 10.213.7.{2 + number}/24 dev eth0")
            for device in ("lo", "eth0"):
                run(f"ip -n {name} link set {device} up")
            run(f"tc qdisc add dev cb{number} {limit}")
            run(f"ip netns exec {name} tc qdisc add dev eth0 {limit}")
        yield dict(names)


def _corral(stack: ExitStack, url: str, tables: str, namespace: str | None = None) -> CorralCli:
    home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="corral-")))
    corral = _Machine(home)
    corral.namespace = namespace
    # A machine has the same port after its restart.
    corral.configure(f'[proxy]\nlisten = "{url.removeprefix("http://")}"\n{tables}')
    stack.callback(corral.end)
    return corral


def _model_text(model: Path) -> str:
    flags = {"parallel": SLOTS, "ctx-size": SLOTS * CTX, "threads": 1, "threads-batch": 1}
    rendered = "\n".join(f"{name} = {value}" for name, value in flags.items())
    return f'[models.chat]\npath = "{model}"\n[models.chat.flags]\n{rendered}\n'


def _nodes_text(urls: Collection[str]) -> str:
    entries = enumerate(sorted(urls))
    return "".join(f'[nodes.n{number}]\nurl = "{url}"\n' for number, url in entries)


def _moves(turns: Sequence[Turn], drains: Sequence[float]) -> Iterator[Move]:
    """Yield the turns that another machine answered, or the same one after its restart."""
    before: dict[tuple[str, str], Turn] = {}
    for turn in sorted(turns, key=lambda turn: turn.began_at_s):
        key = turn.model, turn.messages[0]["content"]
        if earlier := before.get(key):
            its = earlier.result
            is_restarted = any(earlier.began_at_s < at_s < turn.began_at_s for at_s in drains)
            if its.instance != turn.result.instance or is_restarted:
                yield Move(its.prefilled + its.cached, turn.result)
        before[key] = turn


def _result(found: WorkloadResult, drains: Sequence[float]) -> Result:
    firsts = [turn.result for turn in found.turns if len(turn.messages) == 2]
    token_s = statistics.median(first.first_token_s / first.prefilled for first in firsts)
    moves = [*_moves(found.turns, drains)]
    moved = [move for move in moves if move.turn.cached or move.computed_again]
    histories = sum(answer.prefilled + answer.cached for answer in found.answers)
    again = sum(move.computed_again for move in moves)
    ratios = [
        move.turn.first_token_s / (token_s * (move.turn.prefilled + move.turn.cached))
        for move in moved
    ]
    note = (
        f"{len(moves)} of {len(found.turns)} turns moved; computed again: "
        f"{[move.computed_again for move in moves]}; "
        f"first tokens: {[round(ratio, 2) for ratio in ratios]}"
    )
    share, ratio = again / histories, statistics.median(ratios) if ratios else 0.0
    return Result(
        [
            Figure("prompt tokens computed again", "tokens", {"drains": [again]}),
            Figure("prompt tokens", "tokens", {"drains": [histories]}),
            Figure("first token after a move, of computing it", "", {"drains": [ratio]}),
        ],
        {
            f"at most {COMPUTED_AGAIN_MAX} of the histories are computed again ({share:.4f})": (
                share <= COMPUTED_AGAIN_MAX
            ),
            f"the first token comes in {FIRST_TOKEN_MAX} of the time ({ratio:.3f})": (
                ratio <= FIRST_TOKEN_MAX
            ),
            f"no request fails ({len(found.failures)})": not found.failures,
        },
        notes=[note],
    )


if __name__ == "__main__":
    sys.exit(main())
