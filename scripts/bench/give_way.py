"""Check that models leave a card to a program that fills it, and return with their conversations.

Two models lie on Mesa's software Vulkan device: one holds a conversation, clients stream from the
other without a pause. A made program allocates the free memory, then what the models give up, and
frees all at its end. The engines compute on the device; its free memory is counted here, as a card
would: the total, less each running engine and the program.

With `yield = "idle"` the model with the conversation leaves and returns without a request. Its next
first token is compared with a cold one: the same turn on an engine that started without saved
slots. With `yield = "always"` the model of the streams leaves too, once it has answered; its
clients wait, and are answered when it is back.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import aiohttp
from support import software_device, tiny_gguf
from support.corral_cli import CorralCli, until
from support.device_daemon import ON_DEVICE, planned_mib
from support.software_device import SmallDevice

from scripts.bench.conversations import TurnResult, chat
from scripts.bench.mixed_requests import Answer, ModelRequest, send, session
from scripts.bench.overhead_report import spread
from scripts.bench.result import Figure, Result
from supervisor.builds.discover import load

CHAT, STREAMED = "chat", "streamed"
CLIENTS: Final = 3
CHECK_S, RETURN_AFTER_S = 0.5, 1.0
RESERVE_MIB: Final = 8
# The check of memory, two readings of the card, and the end of an engine.
WAY_MAX_S, CACHED_MIN, RATIO_MAX = 5.0, 0.95, 0.3
_HOLD_S: Final = 2.0
_LIMIT_S: Final = 120.0
_FLAGS: Final = ON_DEVICE.replace("parallel = 1", "parallel = {slots}").replace("= 32", "= 128")


@dataclass
class Round:
    """Seconds of one round; `first_token_s` and `cold_s` are without any load."""

    way_s: float = 0.0
    busy_way_s: float | None = None
    back_s: float = 0.0
    cached: float = 0.0
    first_token_s: float = 0.0
    cold_s: float = 0.0


@dataclass
class Card:
    """The device, and the made program on it."""

    device: SmallDevice
    total_mib: int
    each_mib: int
    program_mib: int = 0

    @property
    def free_mib(self) -> int:
        return self.total_mib - self.device.engines * self.each_mib - self.program_mib

    def allocate_rest(self) -> None:
        self.program_mib += max(0, self.free_mib)
        self._write()

    def free(self) -> None:
        self.program_mib = 0
        self._write()

    def _write(self) -> None:
        self.device.set_free(self.total_mib - self.program_mib)


@dataclass
class Streams:
    """Clients that stream without a pause until stopped."""

    answers: list[Answer] = field(default_factory=list)
    is_stopped: bool = False

    async def run(self, http: aiohttp.ClientSession) -> None:
        request = ModelRequest(STREAMED, is_chat=True, is_stream=True, tokens=24, words="Go on.")
        while not self.is_stopped:
            self.answers.append(await send(http, request))


def main() -> int:
    """Measure, print, and return 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--words", type=int, default=200, help="of the conversation")
    parser.add_argument("--quick", action="store_true", help="1 round, 100 words")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.words = 1, 100
    os.environ.update(software_device.SHOW)
    found, answers = dict[str, list[Round]](), dict[str, list[Answer]]()
    for rule in ("idle", "always"):
        with _serving(rule) as (corral, card):
            measured = asyncio.run(_measure(corral, card, rule, options.rounds, options.words))
        found[rule], answers[rule] = measured
    outcome = _result(found, answers)
    outcome.write(options.json)
    for figure in outcome.figures:
        for name, values in figure.values.items():
            print(f"{figure.name}, {name}: {spread(values)} {figure.unit}")
    for goal, is_met in outcome.goals.items():
        print(f"{'met' if is_met else 'missed'}: {goal}")
    return 1 if outcome.missed else 0


@contextmanager
def _serving(rule: str) -> Iterator[tuple[CorralCli, Card]]:
    with tempfile.TemporaryDirectory(prefix="corral-") as directory:
        corral = CorralCli(Path(directory))
        try:
            card = _configure(corral, rule)
            corral.ok("start")
            yield corral, card
        finally:
            corral.end()


def _configure(corral: CorralCli, rule: str) -> Card:
    """Write the models and the device, which has room for both; return it."""
    home = corral.root
    corral.env["CORRAL_CACHE_DIR"] = str(home / "cache")
    model = tiny_gguf.make(
        home / "wide.gguf", embd=256, heads=8, kv_heads=4, layers=4, ff=1024, ctx=8192
    )
    flags = _FLAGS.format(slots=CLIENTS)
    text = "".join(
        f'[models.{name}]\npath = "{model}"\nmin_residency_s = 0\n'
        f"pinned = {str(is_pinned).lower()}\n[models.{name}.flags]\n{flags}\n"
        for name, is_pinned in ((CHAT, False), (STREAMED, rule == "idle"))
    )
    real = load(None, cache_dir=home / "cache")
    corral.configure(f'engine = "{real.path}"\n{text}')
    each_mib = round(planned_mib(corral, CHAT))
    total_mib = 2 * each_mib + 4 * RESERVE_MIB
    device = software_device.write_engine(
        home, real.path, total_mib, real.library_dirs, engine_mib=each_mib
    )
    corral.configure(
        f'engine = "{device.engine}"\n{text}[devices]\nyield = "{rule}"\n'
        f'reserve = "{RESERVE_MIB} MiB"\ncheck_interval_s = {CHECK_S}\n'
        f"return_after_s = {RETURN_AFTER_S}\n"
    )
    return Card(device, total_mib, each_mib)


async def _measure(
    corral: CorralCli, card: Card, rule: str, rounds: int, words: int
) -> tuple[list[Round], list[Answer]]:
    streams, found = Streams(), list[Round]()
    async with session(corral.url) as http, asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(streams.run(http))
        for number in range(rounds):
            # Another conversation in each round, of which the cold turn knows nothing.
            found.append(await _one_round(corral, card, http, rule, f"{number} " + "walk " * words))
            print(f"yield = {rule!r}: round {number + 1} of {rounds}", file=sys.stderr)
        streams.is_stopped = True
    return found, streams.answers


async def _one_round(
    corral: CorralCli, card: Card, http: aiohttp.ClientSession, rule: str, question: str
) -> Round:
    found, messages = Round(), [{"role": "user", "content": question}]
    first, answer = await _ask(http, messages)
    held = first.cached + first.prefilled
    messages += [
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "And then?"},
    ]
    await asyncio.sleep(4 * CHECK_S)  # the card is read before the program starts
    card.allocate_rest()
    found.way_s = await _wait(lambda: card.device.engines == 1)
    card.allocate_rest()
    if rule == "always":
        found.busy_way_s = await _wait(lambda: card.device.engines == 0)
        card.allocate_rest()
    await asyncio.sleep(_HOLD_S)
    card.free()
    found.back_s = await _wait(lambda: _are_loaded(corral))
    back, _ = await _ask(http, messages)
    found.cached, found.first_token_s = 100 * min(1.0, back.cached / held), back.first_token_s
    for verb in (("stop", CHAT), ("slots", "forget", "--all"), ("start", CHAT)):
        await asyncio.to_thread(corral.ok, *verb)
    cold, _ = await _ask(http, messages)
    found.cold_s = cold.first_token_s
    return found


def _are_loaded(corral: CorralCli) -> bool:
    return all(state == "loaded" for state in corral.model_states().values())


async def _ask(
    http: aiohttp.ClientSession, messages: Sequence[dict[str, str]]
) -> tuple[TurnResult, str]:
    body = {"model": CHAT, "messages": messages, "stream": True, "max_tokens": 8}
    return await chat(http, {**body, "temperature": 0})


async def _wait(condition: Callable[[], bool]) -> float:
    """Wait until a condition holds; return for how long."""
    began_s = time.monotonic()
    await asyncio.to_thread(until, condition, within_s=_LIMIT_S)
    return time.monotonic() - began_s


def _result(
    found: Mapping[str, Sequence[Round]], answers: Mapping[str, Sequence[Answer]]
) -> Result:
    def figure(name: str, unit: str, read: Callable[[Round], float | None]) -> Figure:
        values = {
            f"yield = {rule}": [value for each in rounds if (value := read(each)) is not None]
            for rule, rounds in found.items()
        }
        return Figure(name, unit, {rule: seconds for rule, seconds in values.items() if seconds})

    all_rounds = [each for rounds in found.values() for each in rounds]
    all_answers = [answer for rule in answers.values() for answer in rule]
    problems = [answer.problem for answer in all_answers if answer.problem]
    cut = sum(answer.is_cut for answer in all_answers)
    way_s = max(each.way_s for each in all_rounds)
    ratio = statistics.median(each.first_token_s / each.cold_s for each in all_rounds)
    cached = min(each.cached for each in all_rounds)
    longest = {
        f"yield = {rule}": [max(answer.duration_s for answer in of)] for rule, of in answers.items()
    }
    return Result(
        [
            figure("allocation to the end of an idle model", "s", lambda each: each.way_s),
            figure("the same of a model that streams", "s", lambda each: each.busy_way_s),
            figure("end of the program to all models loaded", "s", lambda each: each.back_s),
            figure("history found after the return", "%", lambda each: each.cached),
            figure("first token after the return", "s", lambda each: each.first_token_s),
            figure("the same cold", "s", lambda each: each.cold_s),
            Figure("longest answer of the streams", "s", longest),
        ],
        {
            f"an idle model leaves within {WAY_MAX_S:g} s ({way_s:.1f} s)": way_s <= WAY_MAX_S,
            f"{CACHED_MIN:.0%} of the history found ({cached:.1f} %)": cached >= 100 * CACHED_MIN,
            f"first token within {RATIO_MAX} of cold ({ratio:.2f})": ratio <= RATIO_MAX,
            f"nothing fails, {len(all_answers)} answers ({len(problems)}: {problems[:1]})": (
                not problems
            ),
            f"no cut ({cut})": not cut,
        },
        notes=[
            f"{CLIENTS} clients stream meanwhile; the card is read every {CHECK_S:g} s.",
            f"A model returns when it has had room for {RETURN_AFTER_S:g} s.",
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
