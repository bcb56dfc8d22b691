"""Slot files of conversations that take turns on an engine that serves. 8, 22, 23 and 29."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from faults.daemon_under_test import DaemonUnderTest, kill
from faults.fault import Faults, Seen
from support.corral_cli import until

SLOT_FILES = Faults()

# Two slots, a host cache for one conversation, and batches so small that computing takes long.
_FLAGS = """
[models.m.flags]
threads = 1
parallel = 2
ctx-size = 4096
cache-ram = 1
batch-size = 4
ubatch-size = 4
"""
_TIMEOUT = "[supervisor]\nslot_save_timeout_s = 1\n"
_CONVERSATIONS = 5
# More than the conversations share.
_OWN_TOKENS = 256
_WORDS = ("river", "stone", "cloud", "window", "garden", "paper", "silver", "music")
FROM_FILE, COLD = "answered from disk", "answered from none"


class Conversations:
    """Five conversations over two slots: returning ones are in files."""

    def __init__(self, target: DaemonUnderTest, before: str = "") -> None:
        self.target = target
        self.slots = target.root / "data" / "slots"
        self.spool = self.slots / "spool" / "m.0"
        target.serve({"m": target.models.tiny}, before, _FLAGS)
        chance = random.Random(1)  # noqa: S311 (the same each time)
        texts = (" ".join(chance.choices(_WORDS, k=250)) for _ in range(_CONVERSATIONS))
        self._said = [[{"role": "user", "content": text}] for text in texts]
        self._held: dict[int, int] = {}
        self._order = list(range(_CONVERSATIONS))  # the longest without a turn first
        self.each()
        self.until_saved()

    @property
    def files(self) -> list[Path]:
        manifests = self.slots.glob("kept/m/[0-9a-f]*.json")  # a file without one does not count
        return sorted(manifest.with_suffix(".slot") for manifest in manifests)

    def until_saved(self) -> None:
        """Wait until all is in files."""
        until(lambda: self._saved_tokens() == self._held)

    def _saved_tokens(self) -> dict[int, int]:
        manifests = (json.loads(file.with_suffix(".json").read_bytes()) for file in self.files)
        saved = [manifest["tokens"] for manifest in manifests]
        near = {
            number: held
            for number, held in self._held.items()
            for entry in saved
            if 0 <= held - entry <= 2
        }
        return near if len(saved) == len(self._held) else {}

    def returned(self) -> str:
        """Have turns answered until one finds its conversation in no cache; return from what."""
        answers = (self.turn(self._order[0]) for _ in range(2 * _CONVERSATIONS))
        return next(
            (answer for answer in answers if answer in {FROM_FILE, COLD}), "answered from caches"
        )

    def each(self) -> str:
        """Have a turn of each answered; return `answered` if they were."""
        answers = {self.turn(self._order[0]).split()[0] for _ in range(_CONVERSATIONS)}
        return " ".join(sorted(answers))

    def turn(self, number: int) -> str:
        """Have a conversation's next turn answered; return from what."""
        messages = self._said[number]
        body = {"model": "m", "messages": messages, "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"{self.target.corral.url}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                answer = json.load(response)
        except (OSError, urllib.error.HTTPError) as error:
            return f"{type(error).__name__}: {error}"
        said = answer["choices"][0]["message"]
        self._order.remove(number)
        self._order.append(number)
        timings = answer["timings"]
        self._held[number] = sum(timings[name] for name in ("cache_n", "prompt_n", "predicted_n"))
        self._said[number] = [*messages, said, {"role": "user", "content": "and then? " * 20}]
        is_cold = timings["cache_n"] < _OWN_TOKENS
        return COLD if is_cold else f"answered from {self._tier()}"

    def _tier(self) -> str:
        return str(self.target.events("request.finished")[-1]["cache_tier"])

    def remove(self) -> None:
        """Delete all, while files are being stored or not."""
        while self.slots.exists():
            shutil.rmtree(self.slots, ignore_errors=True)

    @contextmanager
    def turn_beside(self) -> Iterator[list[str]]:
        """Have the turn answered that is due while the block runs; after it the list has how."""
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(self.turn(self._order[0])))
        thread.start()
        try:
            yield found
        finally:
            thread.join()

    @contextmanager
    def engine_suspended(self) -> Iterator[int]:
        pid = self.target.pid("m.0")
        os.kill(pid, signal.SIGSTOP)
        try:
            yield pid
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def left(self) -> str:
        """Return the files that stay in the spool directory."""
        until(lambda: not any(self.spool.glob("*.new")))  # stored in the background
        return f"{[path.name for path in self.spool.iterdir()] or 'nothing'} left"

    def quarantined(self) -> list[str]:
        return [event["reason"] for event in self.target.events("slots.quarantined")]

    def warnings(self) -> list[str]:
        return [event["reason"] for event in self.target.events("slots.save_failed")]


def _harmed(harm: Callable[[Path], None], reasons: list[str]) -> Callable[[DaemonUnderTest], Seen]:
    def inject(target: DaemonUnderTest) -> Seen:
        talks = Conversations(target)
        yield FROM_FILE, talks.returned()
        for path in talks.files:
            harm(path)
        yield COLD, talks.returned()
        seen = [file for file in talks.quarantined() if file.startswith(tuple(reasons))]
        yield f"{len(reasons)} warning", f"{len(seen)} warning"
        yield "no engine died", _deaths(target)
        talks.each()
        yield FROM_FILE, talks.returned()

    return inject


def _deaths(target: DaemonUnderTest) -> str:
    died = [event for event in target.events("instance.exited") if event["fault"]]
    return "an engine died" if died else "no engine died"


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _swap(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 3] + content[: -(len(content) // 3)])


SLOT_FILES.add(23, "slot file with one bit flipped while it serves")(
    _harmed(_flip, ["its content was altered"])
)
SLOT_FILES.add(23, "slot file cut short while it serves")(
    _harmed(lambda path: os.truncate(path, path.stat().st_size // 2), ["it has "])
)
SLOT_FILES.add(23, "slot file of other content while it serves")(
    _harmed(_swap, ["its content was altered"])
)
SLOT_FILES.add(23, "slot file deleted while it serves")(_harmed(Path.unlink, []))


@SLOT_FILES.add(23, "slot directory deleted while it serves")
def _(target: DaemonUnderTest) -> Seen:
    talks = Conversations(target)
    talks.remove()
    yield COLD, talks.returned()
    yield "answered", talks.each()
    yield "no engine died", _deaths(target)


@SLOT_FILES.add(29, "slot directory replaced by a link to another")
def _(target: DaemonUnderTest) -> Seen:
    talks = Conversations(target)
    elsewhere = target.root / "elsewhere"
    elsewhere.mkdir()
    talks.remove()
    talks.slots.symlink_to(elsewhere)
    yield COLD, talks.returned()
    yield "answered", talks.each()
    yield "nothing written there", f"{list(elsewhere.rglob('*')) or 'nothing'} written there"


def _limit_files(target: DaemonUnderTest) -> None:
    """Let the engine write no file of more than 4 KiB."""
    process = psutil.Process(target.pid("m.0"))
    process.rlimit(psutil.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))


@SLOT_FILES.add(22, "no room while an engine writes a slot file")
def _(target: DaemonUnderTest) -> Seen:
    # Without the signal it gets an error in mid-file, as on a full disk.
    engine = target.write_engine("trap '' XFSZ\nexec $ENGINE \"$@\"")
    talks = Conversations(target, f'engine = "{engine}"\n')
    _limit_files(target)
    yield FROM_FILE, talks.returned()
    until(talks.warnings)
    yield FROM_FILE, talks.returned()
    yield "1 warning", f"{len(talks.warnings())} warning"
    yield "nothing left", talks.left()
    yield "no engine died", _deaths(target)


@SLOT_FILES.add(22, "engine dies while it writes a slot file")
def _(target: DaemonUnderTest) -> Seen:
    talks = Conversations(target)
    before = target.pid("m.0")
    _limit_files(target)
    yield FROM_FILE, talks.returned()
    until(talks.warnings)
    yield "answered", talks.each()
    yield "ready again", target.ready_again("m.0", before)
    yield "1 warning", f"{len(talks.warnings())} warning"
    yield FROM_FILE, talks.returned()
    yield "nothing left", talks.left()


@SLOT_FILES.add(23, "engine dies while it reads a slot file")
def _(target: DaemonUnderTest) -> Seen:
    talks = Conversations(target, _TIMEOUT)
    yield FROM_FILE, talks.returned()
    talks.until_saved()
    with talks.engine_suspended() as before, talks.turn_beside() as answer:
        until(lambda: any(talks.spool.glob("*.slot")))
        time.sleep(0.5)  # it is asked to read it
        kill(before)
    yield "answered", answer[0].split()[0]
    yield "ready again", target.ready_again("m.0", before)
    yield "1 warning", f"{len(talks.quarantined())} warning"


@SLOT_FILES.add(23, "engine hangs while it reads a slot file")
def _(target: DaemonUnderTest) -> Seen:
    talks = Conversations(target, _TIMEOUT)
    yield FROM_FILE, talks.returned()
    talks.until_saved()
    with talks.turn_beside() as answer, talks.engine_suspended():
        until(lambda: any(talks.spool.glob("*.slot")))
        time.sleep(2)  # longer than slot_save_timeout_s
    yield "answered", answer[0].split()[0]
    yield "no engine died", _deaths(target)
    yield "nothing left", talks.left()


@SLOT_FILES.add(8, "daemon is killed while an engine writes a slot file")
def _(target: DaemonUnderTest) -> Seen:
    talks = Conversations(target)
    (talks.spool / "0123456789abcdef.new").write_bytes(b"partial")
    (talks.slots / "kept" / "m" / "0123456789abcdef.slot").write_bytes(b"no manifest yet")
    kill(target.corral.daemon_pid)
    until(lambda: not target.corral.engines())
    target.corral.ok("start")
    yield "5 files", f"{len(talks.files)} files"
    yield "nothing left", talks.left()
    yield FROM_FILE, talks.returned()
