"""Compare three machines behind a llama-corral with one machine that has as many slots.

Each machine is a llama-corral on loopback with one engine of one thread and four slots; all serve
SmolLM2-135M and run the conversations of W1 (`scripts/bench/affinity`). Tokens come from the
engines' `timings`. Times are not compared: here all machines share the processor.

A front is restarted half-way through, and two fronts take turns: once with one API key for all, so
that the machines tell each front the prompts of the others, and once with a different key for each
front and each start, so that they do not.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from support import tiny_gguf
from support.corral_cli import CorralCli, until

from scripts.bench.affinity import FIRST_SEED, W1
from scripts.bench.conversations import Clients, WorkloadResult
from scripts.bench.result import Figure, Result
from supervisor.models import pinned
from supervisor.rpc.address import free_port
from supervisor.system.paths import directories

MACHINES: Final = 3
SLOTS: Final = 4
CTX: Final = 4096
GOAL: Final = 1.15
KEYS: Final = ("key-of-the-fronts", "key-of-the-second", "key-after-restart")


@dataclass(frozen=True)
class Setup:
    """Where the conversations are computed.

    Attributes:
        machines: Behind the fronts; 0: there is no front, and one machine has all slots.
        engines: Of that one machine.
        fronts: That take turns.
        is_restarted: Whether the front is restarted half-way through.
        shares: Whether all fronts have one key.
    """

    name: str
    machines: int = MACHINES
    engines: int = MACHINES
    fronts: int = 1
    is_restarted: bool = False
    shares: bool = True


ONE: Final = Setup("one machine, three engines", machines=0)
WHOLE: Final = Setup("one machine, one engine", machines=0, engines=1)
FRONT: Final = Setup("three machines")
RESTARTED: Final = Setup("front restarted", is_restarted=True)
FORGETFUL: Final = Setup("front restarted, not told", is_restarted=True, shares=False)
TWO: Final = Setup("two fronts", fronts=2)
APART: Final = Setup("two fronts, not told", fronts=2, shares=False)
SETUPS: Final = (ONE, WHOLE, FRONT, RESTARTED, FORGETFUL, TWO, APART)
NAMES: Final = tuple(setup.name for setup in SETUPS)


@dataclass
class Running:
    """A running setup; clients connect to `fronts`."""

    setup: Setup
    fronts: list[CorralCli] = field(default_factory=list)
    machines: list[CorralCli] = field(default_factory=list)

    def after(self, count: int) -> None:
        """Restart the front after half of the answers."""
        if self.setup.is_restarted and count == W1.conversations * W1.turns // 2:
            (front,) = self.fronts
            front.ok("stop")
            if not self.setup.shares:
                _write(front.root / "key", KEYS[2])
            self._begin(front)

    def begin(self) -> None:
        for front in self.fronts:
            self._begin(front)

    def _begin(self, front: CorralCli) -> None:
        front.ok("start")
        states = ["up"] * len(self.machines)
        until(lambda: [node.state for node in front.status().nodes] == states)


def main() -> int:
    """Run the setups, print their table, and return 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("setups", nargs="*", choices=[[], *NAMES], default=[], help="default: all")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each setup")
    parser.add_argument("--tiny", action="store_true", help="use a random model of 270 kB")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        setups = [
            setup for setup in SETUPS if setup == ONE or setup.name in (options.setups or NAMES)
        ]
        model = _model(Path(directory), is_tiny=options.tiny)
        results = _interleaved(setups, model, options.seeds)
    _show(results)
    found = _result(results)
    found.write(options.json)
    for goal in found.missed:
        print(f"missed: {goal}")
    return 1 if found.missed else 0


def _model(directory: Path, *, is_tiny: bool) -> Path:
    if is_tiny:
        return tiny_gguf.make(directory / "tiny.gguf", ctx=MACHINES * SLOTS * CTX)
    return pinned.find_pin("smollm2").path(directories().models)


Results = Mapping[Setup, Sequence[WorkloadResult]]


def _interleaved(setups: Sequence[Setup], model: Path, seeds: int) -> Results:
    """Run every setup once per seed, in turns of the order."""
    results: dict[Setup, list[WorkloadResult]] = {setup: [] for setup in setups}
    for number in range(seeds):
        for setup in setups if number % 2 == 0 else reversed(setups):
            results[setup].append(_run(setup, model, FIRST_SEED + number))
            tokens = results[setup][-1].prefilled
            print(f"seed {FIRST_SEED + number}, {setup.name}: {tokens}", file=sys.stderr)
    return results


def _run(setup: Setup, model: Path, seed: int) -> WorkloadResult:
    with _serving(setup, model) as running:
        urls = itertools.cycle([front.url for front in running.fronts])
        clients = Clients(lambda: next(urls), lambda _: "chat", W1, seed, running.after)
        return asyncio.run(clients.run())


@contextmanager
def _serving(setup: Setup, model: Path) -> Iterator[Running]:
    """Serve for the length of the block, starting with empty caches."""
    running = Running(setup)
    with ExitStack() as stack:
        if not setup.machines:
            slots = MACHINES * SLOTS // setup.engines
            running.fronts.append(_corral(stack, _model_text(model, setup.engines, slots)))
        for _ in range(setup.machines):
            machine = _corral(stack, _model_text(model, 1, SLOTS), "api_keys_file")
            machine.ok("start")
            running.machines.append(machine)
        for number in range(setup.fronts if setup.machines else 0):
            front = _corral(stack, _nodes_text(running.machines))
            _write(front.root / "key", KEYS[0 if setup.shares else number])
            running.fronts.append(front)
        running.begin()
        yield running


def _corral(stack: ExitStack, tables: str, keys: str = "") -> CorralCli:
    """Return a llama-corral that does not run; `keys` names the setting for its file of keys."""
    home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="corral-")))
    corral = CorralCli(home)
    entries = "".join(f'[keys.k{at}]\nkey = "{key}"\n' for at, key in enumerate(KEYS))
    _write(home / "keys.toml", entries)
    setting = f'{keys} = "{home / "keys.toml"}"\n' if keys else ""
    # A front has the same port after its restart.
    listen = f'[proxy]\nlisten = "127.0.0.1:{free_port()}"\n'
    corral.configure(listen + setting + tables.replace("HOME", str(home)))
    stack.callback(corral.end)
    return corral


def _model_text(model: Path, engines: int, slots: int) -> str:
    flags = {"parallel": slots, "ctx-size": slots * CTX, "threads": 1, "threads-batch": 1}
    rendered = "\n".join(f"{name} = {value}" for name, value in flags.items())
    return (
        f'[models.chat]\npath = "{model}"\nreplicas = {engines}\n[models.chat.flags]\n{rendered}\n'
    )


def _nodes_text(machines: Sequence[CorralCli]) -> str:
    return "".join(
        f'[nodes.n{number}]\nurl = "{machine.url}"\nkey_file = "HOME/key"\n'
        for number, machine in enumerate(machines)
    )


def _write(path: Path, text: str) -> None:
    path.touch(0o600)
    path.write_text(text, "utf-8")


def _show(results: Results) -> None:
    """Print a line for each setup; ratios are to one machine, seed by seed."""
    print(f"\n{W1}\n{MACHINES} times {SLOTS} slots\n")
    heads = ("tokens computed", "cached", "x three engines", "x one engine", "failed")
    print("{:28} {:>22} {:>7} {:>20} {:>20} {:>7}".format("", *heads))
    for setup, runs in results.items():
        tokens = [run.prefilled for run in runs]
        mean = f"{statistics.mean(tokens):.0f} ({min(tokens)} to {max(tokens)})"
        cached = statistics.mean(run.cached_share for run in runs)
        ratios = [_spread(results, setup, base) for base in (ONE, WHOLE)]
        failed = sum(len(run.failures) for run in runs)
        print(
            f"{setup.name:28} {mean:>22} {cached:7.3f} {ratios[0]:>20} {ratios[1]:>20} {failed:7}"
        )


def _result(results: Results) -> Result:
    values = {setup.name: [run.prefilled for run in runs] for setup, runs in results.items()}
    ratios = {
        case: statistics.mean(_ratios(results, case, ONE))
        for case in (FRONT, RESTARTED, TWO)
        if case in results
    }
    return Result(
        [Figure("W1 over machines: prompt tokens computed", "tokens", values, base=ONE.name)],
        {
            f"{setup.name}: at most {GOAL} times the tokens of one machine ({ratio:.2f})": ratio
            <= GOAL
            for setup, ratio in ratios.items()
        },
    )


def _ratios(results: Results, setup: Setup, other: Setup) -> list[float]:
    pairs = zip(results[setup], results[other], strict=True)
    return [run.prefilled / base.prefilled for run, base in pairs]


def _spread(results: Results, setup: Setup, base: Setup) -> str:
    ratios = _ratios(results, setup, base) if base in results else []
    if not ratios:
        return ""
    return f"{statistics.mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


if __name__ == "__main__":
    sys.exit(main())
