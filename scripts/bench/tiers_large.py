"""Saves and restores conversations of the size that an 8B model makes: 128 KiB a token in f16.

The model has the KV cache of Llama 3.1 8B, or that and the recurrent states of Qwen 3.5 9B, and
next to no weights (`large_model`), so it computes prompts much faster than a real model: this
measures the time of files.

For each size, a conversation is computed (cold), and saved by its idle engine. A stream of another
conversation then shows how long an engine stands still while it saves the first one. Daemon and
engine are killed (-9); the next start has two replicas of one slot each, for which the file is
rewritten. Then the engine that answers is killed too, and the next turn goes to the other replica.

With f16 on two cores with a load of 8, 2 000 and 8 000 tokens took 5 minutes, and the cold prompt
of 32 000 took 26; with q8_0 prompts take several times as long. `--disk-mib-s` limits the reads and
writes of daemon and engines by a control group; with version 1, only transfers past the page cache.
`--disk-room-mib` gives them a file system of this size. Both need root.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import string
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil
from support.corral_cli import CorralCli, until

from scripts.bench import large_model
from scripts.bench.conversations import TurnResult, chat
from scripts.bench.result import Figure, Result, one_round

SIZES: Final = (2_000, 8_000, 32_000)
SHORT: Final = (2_000, 8_000)
_ANSWER_TOKENS: Final = 8
_SPARE_TOKENS: Final = 4_096
_STREAM_S: Final = 3.0
_WAIT_S: Final = 3600.0
# The longest wait of an idle engine for a save of 4 s, and some time to store it.
_SAVED_WITHIN_S: Final = 45.0
_SHARE_MIN: Final = 0.9
_CGROUPS: Final = Path("/sys/fs/cgroup")
_GIB: Final = 1024**3
# Free memory to leave.
_MEMORY_RESERVE_BYTES: Final = 2 * _GIB
_TOKEN_BYTES: Final = {"f16": 128 * 1024, "q8_0": 68 * 1024}

Row = dict[str, float]


def measure(
    sizes: Sequence[int],
    caches: Sequence[str],
    disk_mib_s: int | None,
    room_mib: int | None,
    *,
    is_hybrid: bool,
) -> Result:
    """Measure each size with each type of cache, on a slow or small disk if given."""
    make = large_model.make_light_hybrid if is_hybrid else large_model.make_light
    rows: dict[str, Row] = {}
    not_measured: dict[str, str] = {}
    with (
        tempfile.TemporaryDirectory(prefix="corral-") as directory,
        _slow_disk(disk_mib_s, Path(directory)),
        _small_disk(room_mib) as small,
    ):
        model = make(Path(directory, "light.gguf"))
        for cache in caches:
            for size in sizes:
                name = f"{size} tokens, {cache}"
                if not small and (reason := _reason_against(size, cache, Path(directory))):
                    not_measured[name] = reason
                    continue
                rows[name] = asyncio.run(_Run(model, size, cache, small).measure())
                print(f"{name}: {_shown(rows[name])}", file=sys.stderr)
    titles = dict.fromkeys(title for row in rows.values() for title in row)
    figures = [
        one_round(*_parts(title), {name: row[title] for name, row in rows.items()})
        for title in titles
    ]
    goals = {} if small else _goals(rows)  # a full disk holds nothing
    return Result(figures, goals, not_measured, [_HYBRID_NOTE if is_hybrid else _NOTE])


def show(result: Result) -> None:
    """Print the figures as a table."""
    names = list(result.figures[0].values) if result.figures else []
    print(" ".join([f"{'':44}", *(f"{name:>20}" for name in names)]))
    for figure in result.figures:
        values = (f"{figure.values[name][0]:20,.3f}" for name in names)
        print(" ".join([f"{_title(figure):44}", *values]))
    for name, reason in result.not_measured.items():
        print(f"{name}: not measured, {reason}")


def _parts(title: str) -> tuple[str, str]:
    """Return the name and the unit of a figure."""
    name, is_parted, unit = title.rpartition(", ")
    return (name, unit) if is_parted else (title, "")


def _title(figure: Figure) -> str:
    return f"{figure.name} ({figure.unit})" if figure.unit else figure.name


def _reason_against(size: int, cache: str, directory: Path) -> str:
    cache_bytes = 2 * (size + _SPARE_TOKENS) * _TOKEN_BYTES[cache]
    need_bytes = 2 * cache_bytes  # two files while one replaces the other, or pages of the file
    free_bytes = shutil.disk_usage(directory).free
    memory_bytes = psutil.virtual_memory().available - _MEMORY_RESERVE_BYTES
    if cache_bytes > memory_bytes:
        return (
            f"it takes {cache_bytes / _GIB:.1f} GiB of memory, {memory_bytes / _GIB:.1f} are free"
        )
    if need_bytes > free_bytes:
        return f"it takes {need_bytes / _GIB:.1f} GiB of disk, {free_bytes / _GIB:.1f} are free"
    return ""


class _Run:
    """One conversation, from its first turn to its return on another replica."""

    def __init__(self, model: Path, size: int, cache: str, home: str | None) -> None:
        self._home = home
        self._model = model
        self._size = size
        self._cache = cache
        self._rng = random.Random(size)  # noqa: S311 (texts)
        self._messages: list[Mapping[str, str]] = []

    async def measure(self) -> Row:
        with tempfile.TemporaryDirectory(prefix="corral-", dir=self._home) as home:
            corral = CorralCli(Path(home))
            try:
                self._configure(corral, replicas=1, slots=2)
                return await (self._measure_full(corral) if self._home else self._measure(corral))
            finally:
                corral.end()

    async def _measure(self, corral: CorralCli) -> Row:
        more = self._size // 28  # so many that the file is written again
        corral.ok("start")
        cold = await self._turn(corral.url, self._size)
        row: Row = {"cold: first token, s": cold.first_token_s}
        row["cold: tokens a second"] = cold.prefilled / cold.prefill_s
        row["saved by itself after, s"] = await _saved_by_itself(corral)
        row["save: engine stands still, s"] = _operations(corral, "saves")["duration_s"]
        if not corral.data("slots", "list"):
            corral.ok("slots", "save")
        row["save: GiB"] = corral.data("slots", "list")[0]["size_bytes"] / _GIB
        row |= self._memory(corral)
        await self._turn(corral.url, more)
        row |= await _pauses(corral)
        corral.kill()

        self._configure(corral, replicas=2, slots=1)
        began_at_s = time.monotonic()
        corral.ok("start")
        row["killed: start, s"] = time.monotonic() - began_at_s
        row["killed: of this, restore (rewritten), s"] = _restored_s(corral)
        seen = len(corral.events("request.finished"))
        found = await self._turn(corral.url, more)
        row["killed: first token (of some 4 % more), s"] = found.first_token_s
        row["killed: tokens found, %"] = 100 * found.cached / (found.cached + found.prefilled)
        corral.ok("slots", "save")
        before = _instance_after(corral, seen)
        pid = corral.instances()[before].pid
        next(engine for engine in corral.engines() if engine.pid == pid).kill()
        other = await self._turn(corral.url, 4)
        restores = _operations(corral, "restores")
        row["other replica: first token, s"] = other.first_token_s
        row["other replica: restore, s"] = restores["duration_s"]
        row["other replica: tokens found, %"] = (
            100 * other.cached / (other.cached + other.prefilled)
        )
        row["other replica: it answered"] = float(_instance_after(corral, seen + 1) != before)
        row["restore, s for a GiB"] = restores["duration_s"] * _GIB / max(1, restores["size_bytes"])
        row["cold / first token on the other replica"] = cold.first_token_s / other.first_token_s
        return row

    async def _measure_full(self, corral: CorralCli) -> Row:
        """Return the files that are left on a disk that is too small for the conversation."""
        corral.ok("start")
        cold = await self._turn(corral.url, self._size)
        print(corral("slots", "save").stdout.strip(), file=sys.stderr)
        next_turn = await self._turn(corral.url, 4)
        warnings = [*corral.events("slots.disk_full"), *corral.events("slots.save_failed")]
        for warning in warnings:
            print(f"{warning['event']}: {warning['reason']}", file=sys.stderr)
        corral.ok("stop")
        corral.ok("start")
        after = await self._turn(corral.url, 4)
        files = [path for path in (corral.root / "data").rglob("*") if path.is_file()]
        return {
            "cold: first token, s": cold.first_token_s,
            "next turn: first token, s": next_turn.first_token_s,
            "after a restart: first token, s": after.first_token_s,
            "warnings": len(warnings),
            "slot files": sum(path.suffix == ".slot" for path in files),
            "files, MiB": sum(path.stat().st_size for path in files) / 1024**2,
        }

    def _configure(self, corral: CorralCli, *, replicas: int, slots: int) -> None:
        ctx = slots * (self._size + _SPARE_TOKENS)
        flags = f'parallel = {slots}\nctx-size = {ctx}\ncache-ram = 0\nflash-attn = "on"\n'
        flags += f'cache-type-k = "{self._cache}"\ncache-type-v = "{self._cache}"\n'
        corral.configure(
            f'[models.chat]\npath = "{self._model}"\nreplicas = {replicas}\n'
            f"[models.chat.flags]\n{flags}"
        )

    async def _turn(self, url: str, tokens: int) -> TurnResult:
        question = " ".join(self._rng.choices(string.ascii_lowercase, k=tokens))
        self._messages.append({"role": "user", "content": question})
        body = {
            "model": "chat",
            "messages": self._messages,
            "stream": True,
            "max_tokens": _ANSWER_TOKENS,
            "temperature": 0,
        }
        async with _session(url) as http:
            result, text = await chat(http, body)
        self._messages.append({"role": "assistant", "content": text})
        return result

    def _memory(self, corral: CorralCli) -> Row:
        (engine,) = corral.engines()
        files = list((corral.root / "data" / "slots").rglob("*.slot"))
        return {
            "memory of the engine, GiB": engine.memory_info().rss / _GIB,
            "memory of the daemon, GiB": psutil.Process(corral.daemon_pid).memory_info().rss / _GIB,
            "page cache of the file, GiB": sum(map(_cached_bytes, files)) / _GIB,
        }


def _session(url: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=_WAIT_S))


async def _pauses(corral: CorralCli) -> Row:
    """Return the longest gaps of a stream: undisturbed, and while the other slot is saved."""
    gaps: list[tuple[float, float]] = []  # when it ended, its length
    body = {"model": "chat", "prompt": "a", "ignore_eos": True, "temperature": 0, "stream": True}
    async with _session(corral.url) as http, asyncio.TaskGroup() as group:

        async def stream() -> None:
            async with http.post("/v1/completions", json={**body, "max_tokens": 900}) as response:
                before_s = 0.0
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        now_s = time.monotonic()
                        if before_s:
                            gaps.append((now_s, now_s - before_s))
                        before_s = now_s

        streaming = group.create_task(stream())
        await asyncio.sleep(_STREAM_S)
        forced_at_s = time.monotonic()
        await asyncio.to_thread(corral.ok, "slots", "save")
        saved_s = time.monotonic() - forced_at_s
        await asyncio.sleep(0.2)
        streaming.cancel()
    return {
        "stream: longest gap, s": max(gap_s for at_s, gap_s in gaps if at_s < forced_at_s),
        "stream: longest gap with corral slots save, s": max(
            gap_s for at_s, gap_s in gaps if at_s >= forced_at_s
        ),
        "corral slots save, s": saved_s,
    }


async def _saved_by_itself(corral: CorralCli) -> float:
    """Return when the idle engine had saved its conversation; 0: it did not pay, or no room."""
    began_at_s = time.monotonic()
    while time.monotonic() - began_at_s < _SAVED_WITHIN_S:
        if _operations(corral, "saves")["count"] and corral.data("slots", "list"):
            return time.monotonic() - began_at_s
        await asyncio.sleep(0.2)
    return 0.0


def _operations(corral: CorralCli, kind: str) -> Mapping[str, float]:
    found: Mapping[str, float] = corral.data("slots")["models"][0][kind]
    return found


def _instance_after(corral: CorralCli, seen: int) -> str:
    """Return which instance answered the request after `seen` others; its response may not."""
    until(lambda: len(corral.events("request.finished")) > seen)  # it follows the last byte
    return str(corral.events("request.finished")[-1]["instance"])


def _restored_s(corral: CorralCli) -> float:
    """Return the time of the restores of the latest start."""
    events: list[dict[str, Any]] = corral.events("slots.restored")
    return float(events[-1]["duration_ms"]) / 1000 if events else 0.0


def _cached_bytes(path: Path) -> int:
    """Return how much of a file is in the page cache; 0 without fincore of util-linux."""
    if not (fincore := shutil.which("fincore")):
        return 0
    argv = [fincore, "--bytes", "--noheadings", "--output", "RES", str(path)]
    return int(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)


@contextmanager
def _slow_disk(mib_s: int | None, directory: Path) -> Iterator[None]:
    """Limit reads and writes of this process and its children on the disk of a directory."""
    if mib_s is None:
        yield
        return
    device = directory.stat().st_dev
    disk, limit = f"{os.major(device)}:{os.minor(device)}", mib_s * 1024**2
    if (_CGROUPS / "blkio").is_dir():
        root = _CGROUPS / "blkio"
        lines = {f"blkio.throttle.{way}_bps_device": f"{disk} {limit}" for way in ("read", "write")}
    else:
        root, lines = _CGROUPS, {"io.max": f"{disk} rbps={limit} wbps={limit}"}
    group = root / f"corral-bench-{os.getpid()}"
    group.mkdir()
    try:
        for name, line in lines.items():
            (group / name).write_text(line, "ascii")
        (group / "cgroup.procs").write_text(str(os.getpid()), "ascii")
        yield
    finally:
        (root / "cgroup.procs").write_text(str(os.getpid()), "ascii")
        group.rmdir()


@contextmanager
def _small_disk(mib: int | None) -> Iterator[str | None]:
    """Yield a directory whose file system has this size; None for the usual one."""
    if mib is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="corral-disk-") as directory:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", directory]
        subprocess.run(mount, check=True)
        try:
            yield directory
        finally:
            subprocess.run(["umount", directory], check=True)  # noqa: S607 (no input)


def _shown(row: Row) -> str:
    return ", ".join(f"{title} {value:.3f}" for title, value in row.items())


def _goals(rows: Mapping[str, Row]) -> Mapping[str, bool]:
    goals = {}
    for name, row in rows.items():
        for after in ("killed", "other replica"):
            share = row[f"{after}: tokens found, %"] / 100
            goals[f"{name}, {after}: {_SHARE_MIN:.0%} found ({share:.1%})"] = share >= _SHARE_MIN
    return goals


_HYBRID_NOTE: Final = (
    "A model with the KV cache and recurrent states of Qwen 3.5 9B and next to no weights: its "
    "prompts are computed faster than a real one's on the same processor."
)
_NOTE: Final = (
    "A model with the KV cache of Llama 3.1 8B and next to no weights: its prompts are computed "
    "faster than a real one's on the same processor, so the ratio is a lower bound there. The "
    "speed of a real 8B model was not measured."
)
