"""Random conversations on the real engine; compares what it finds with the model of its host cache.

Conversations share system prompts, are edited, end and begin. A turn whose slot still holds its
conversation names that slot, as the router does; sometimes all idle slots get an empty prompt, or
the engine chooses a slot for one, so that it copies all of them. Two figures for each limit: in how
many turns the engine found what was believed (slot, host cache or neither), and how many of its
copies, which it logs after each step, are the believed ones. Exit code 1 where a share is below
0.95.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

import xxhash
from support import tiny_gguf

from proxy.cache.host_cache import EMPTY, HostCache, SlotContent
from proxy.cache.prompt import BLOCK_TOKENS
from supervisor.builds.discover import load
from supervisor.builds.probe import environment

GOAL: Final = 0.95
LIMITS_MIB: Final = (8, 32, 256)
_MIB: Final = 1024**2
_SLOTS: Final = 4
_LAYERS: Final = 12
_WIDTH: Final = 256
# Keys and values of 16 bits.
_TOKEN_BYTES: Final = _LAYERS * 2 * _WIDTH * 2
_WORDS: Final = range(300, 370)  # ids of letters
_COPY: Final = re.compile(r"update:    - prompt \S+ +(\d+) tokens")
_STATE: Final = re.compile(r"update:  - cache state:")
_FOUND_MIN: Final = 0.9


@dataclass(eq=False)
class Chat:
    """A conversation.

    Attributes:
        tokens: Of its next prompt, without the user's next message.
        system_tokens: That others begin with too: they may be found where nothing is held.
    """

    tokens: list[int]
    system_tokens: int
    turns: int = 0


@dataclass
class Shares:
    """How often the belief was right, by believed place."""

    right: dict[str, int] = field(default_factory=dict)
    all: dict[str, int] = field(default_factory=dict)

    def note(self, belief: str, right: int, of: int = 1) -> None:
        self.all[belief] = self.all.get(belief, 0) + of
        self.right[belief] = self.right.get(belief, 0) + right

    @property
    def share(self) -> float:
        return sum(self.right.values()) / max(1, sum(self.all.values()))

    def __str__(self) -> str:
        parts = [f"{name} {self.right[name]}/{of}" for name, of in sorted(self.all.items())]
        return f"{self.share:.3f} ({', '.join(parts)})"


class Engine:
    """A llama-server, and its log."""

    def __init__(self, port: int, log: Path) -> None:
        self._port = port
        self._log = log
        self._read = 0

    def post(self, **body: Any) -> Any:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/completion",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)

    def copies(self) -> list[int] | None:
        """Return the tokens of each copy, as logged last; None where nothing was logged."""
        text = self._log.read_bytes()[self._read :].decode(errors="replace")
        self._read += len(text.encode())
        parts = _STATE.split(text)
        return [int(match) for match in _COPY.findall(parts[-1])] if len(parts) > 1 else None


class Check:
    """One engine, and the belief about it."""

    def __init__(self, engine: Engine, limit_mib: int, chance: random.Random) -> None:
        self.turns, self.copies = Shares(), Shares()
        self._engine = engine
        self._chance = chance
        self._cache = HostCache(limit_mib * _MIB, _TOKEN_BYTES)
        self._slots = dict.fromkeys(range(_SLOTS), EMPTY)
        self._order = [3, 2, 1, 0]  # the one used longest ago first
        self._systems = [self._text(chance.randint(20, 150)) for _ in range(3)]
        self._chats: list[Chat] = []
        self._most = max(6, limit_mib * _MIB // (_TOKEN_BYTES * 250))

    def step(self) -> None:
        if self._chance.random() < 0.1:
            self._refresh()
            return
        if self._chance.random() < 0.1:
            self._copy()
            return
        chat = self._pick()
        if self._chance.random() < 0.05:
            del chat.tokens[len(chat.tokens) // 2 :]  # an edit
        kept = len(chat.tokens)
        chat.tokens += self._text(self._chance.randint(5, 60))
        slot = next(
            (slot for slot, held in self._slots.items() if cast("Any", chat) is held.conversation),
            None,
        )
        where, held = self._believe(chat, slot)
        self._send(chat, slot, (where, min(held, kept)))

    def _believe(self, chat: Chat, slot: int | None) -> tuple[str, int]:
        if slot is not None:
            return "slot", self._slots[slot].tokens
        held = self._cache.holds(chat)
        return ("host cache", held) if held else ("neither", 0)

    def _send(self, chat: Chat, slot: int | None, belief: tuple[str, int]) -> None:
        blocks = _blocks(chat.tokens)
        if slot is None:
            slot = self._order[0]
            self._cache.note_slot_taken(self._slots[slot], chat, blocks)
            named = {}
        else:
            named = {"id_slot": slot}
        self._slots[slot] = EMPTY
        self._cache.note_copies(self._slots.values())
        answer = self._engine.post(
            prompt=chat.tokens, n_predict=3, temperature=0, return_tokens=True, **named
        )
        timings, before = answer["timings"], len(chat.tokens)
        if answer["id_slot"] != slot:
            raise RuntimeError(f"the engine took slot {answer['id_slot']}, not {slot}")
        self._note(chat, belief, timings["cache_n"])
        chat.tokens += answer["tokens"]
        chat.turns += 1
        held = before + timings["predicted_n"] - 1
        self._slots[slot] = SlotContent(cast("Any", chat), held, blocks)
        self._use(slot)
        self._compare()

    def _note(self, chat: Chat, belief: tuple[str, int], found: int) -> None:
        where, held = belief
        self._cache.note_found(chat, found)
        if chat.turns == 0:
            return
        is_right = found >= _FOUND_MIN * held if held else found < chat.system_tokens + BLOCK_TOKENS
        self.turns.note(where, int(is_right))

    def _refresh(self) -> None:
        for slot in tuple(self._order):
            others = (held for id_slot, held in self._slots.items() if id_slot != slot)
            self._cache.note_copies(others)
            self._engine.post(prompt=[[]], n_predict=0, id_slot=slot)
        self._compare()

    def _copy(self) -> None:
        oldest = self._order[0]
        self._cache.note_copies([self._slots[oldest], *self._slots.values()])
        taken = self._engine.post(prompt=[[]], n_predict=0)["id_slot"]
        if taken != oldest:
            raise RuntimeError(f"the engine took slot {taken}, not {oldest}")
        self._use(taken)
        self._compare()

    def _compare(self) -> None:
        copies = self._engine.copies()
        if copies:
            believed = Counter(self._cache.copied_tokens)
            right = (Counter(copies) & believed).total()
            self.copies.note("copies", right, max(len(copies), believed.total()))

    def _use(self, slot: int) -> None:
        self._order.remove(slot)
        self._order.append(slot)

    def _pick(self) -> Chat:
        begins = len(self._chats) < self._most and self._chance.random() < 0.3
        if begins or not self._chats:
            system = self._chance.choice(self._systems)
            chat = Chat([*system, *self._text(self._chance.randint(60, 200))], len(system))
            self._chats.append(chat)
            return chat
        # The latest more often.
        at = min(int(self._chance.expovariate(0.15)), len(self._chats) - 1)
        chat = self._chats.pop(-1 - at)
        if chat.turns < 12:
            self._chats.append(chat)
        return chat

    def _text(self, tokens: int) -> list[int]:
        return self._chance.choices(_WORDS, k=tokens)


def _blocks(tokens: Sequence[int]) -> tuple[int, ...]:
    chain, found = 0, []
    for at in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        chain = xxhash.xxh3_64_intdigest(repr(tokens[at : at + BLOCK_TOKENS]).encode(), chain)
        found.append(chain)
    return tuple(found)


@contextmanager
def _engine(directory: Path, limit_mib: int) -> Iterator[Engine]:
    engine, port, log = (
        load(None, cache_dir=directory),
        _free_port(),
        directory / f"log-{limit_mib}",
    )
    model = directory / "model.gguf"
    if not model.exists():
        tiny_gguf.make(model, embd=_WIDTH, heads=8, layers=_LAYERS, ff=256, ctx=32_768)
    flags = (
        f"-np {_SLOTS} -c {_SLOTS * 4096} -t 1 -b 512 --no-kv-unified -sps 0 -cram {limit_mib} "
        f"--host 127.0.0.1 --port {port} -lv 5 --no-ui -ngl 0"
    ).split()
    with (
        log.open("wb") as out,
        subprocess.Popen(
            [engine.path, "-m", model, *flags],
            stdout=out,
            stderr=out,
            env=environment(os.environ, engine.path, engine.library_dirs),
        ) as process,
    ):
        try:
            _wait(port, process)
            yield Engine(port, log)
        finally:
            process.kill()


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port


def _wait(port: int, engine: subprocess.Popen[bytes]) -> None:
    while engine.poll() is None:
        with suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        time.sleep(0.05)
    raise RuntimeError(f"the engine ended with {engine.returncode}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=400, help="for each limit")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--turns", action="store_true", help="leave out the copies, read in logs")
    parser.add_argument("--limits", type=int, nargs="*", default=LIMITS_MIB, metavar="MIB")
    options = parser.parse_args(arguments)
    worst = 1.0
    with tempfile.TemporaryDirectory() as directory:
        for limit_mib in options.limits:
            with _engine(Path(directory), limit_mib) as engine:
                check = Check(engine, limit_mib, random.Random(options.seed))  # noqa: S311
                for _ in range(options.steps):
                    check.step()
            print(f"{limit_mib:4} MiB: turns {check.turns}; {check.copies}")
            copies = 1.0 if options.turns else check.copies.share
            worst = min(worst, check.turns.share, copies)
    return 0 if worst >= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
