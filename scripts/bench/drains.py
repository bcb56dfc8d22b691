"""Drain machines in turn, under load: how many tokens others compute again.

Three machines on loopback, each a llama-corral with one engine of one thread, share a directory of
slot files (`slots_directory`); a front sends turns to them. While the clients go on, each machine
is stopped, which drains it, and started again. Tokens come from the engines' `timings`. The time of
a first token is compared with that of computing the same prompt, at the speed of the first turns
of the conversations in this run.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
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
    """A turn on another process than the turn before; `history` is what that had in its slot."""

    history: int
    turn: TurnResult

    @property
    def computed_again(self) -> int:
        return max(0, self.history - self.turn.cached)


def main() -> int:
    """Run the conversations, print the figures, and return 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=WORKLOAD.conversations)
    parser.add_argument("--private", action="store_true", help="without a shared directory")
    parser.add_argument("--tiny", action="store_true", help="use a random model of 270 kB")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    workload = replace(WORKLOAD, conversations=options.conversations)
    found = _result(*_run(workload, is_shared=not options.private, is_tiny=options.tiny))
    found.write(options.json)
    for figure in found.figures:
        print(f"{figure.name}: {figure.values} {figure.unit}")
    for note in found.notes:
        print(note)
    for goal in found.missed:
        print(f"missed: {goal}")
    return 1 if found.missed else 0


def _run(
    workload: Workload, *, is_shared: bool, is_tiny: bool
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
        shared = f'[supervisor]\nslots_directory = "{home / "slots"}"\n' if is_shared else ""
        machines = [_corral(stack, shared + _model_text(model)) for _ in range(MACHINES)]
        for machine in machines:
            machine.ok("start")
        front = _corral(stack, "".join(_nodes_text(machines)))
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


def _corral(stack: ExitStack, tables: str) -> CorralCli:
    home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="corral-")))
    corral = CorralCli(home)
    # A machine has the same port after its restart.
    corral.configure(f'[proxy]\nlisten = "127.0.0.1:{free_port()}"\n{tables}')
    stack.callback(corral.end)
    return corral


def _model_text(model: Path) -> str:
    flags = {"parallel": SLOTS, "ctx-size": SLOTS * CTX, "threads": 1, "threads-batch": 1}
    rendered = "\n".join(f"{name} = {value}" for name, value in flags.items())
    return f'[models.chat]\npath = "{model}"\n[models.chat.flags]\n{rendered}\n'


def _nodes_text(machines: Sequence[CorralCli]) -> Iterator[str]:
    for number, machine in enumerate(machines):
        yield f'[nodes.n{number}]\nurl = "{machine.url}"\n'


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
