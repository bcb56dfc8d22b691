"""Passes files to commands in child processes: settings, keys, profiles, GGUF."""

from __future__ import annotations

import contextlib
import importlib
import json
import selectors
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from fuzz.case import Case
from fuzz.finding import Example, Findings, Limits, Report
from fuzz.sample import ran
from support import tiny_gguf
from support.corral_cli import CorralCli

# After this wall time a case hangs; the limit of 2 s is processor time.
_HANG_S: Final = 15.0
_CASES_OF_A_CHILD: Final = 500
# One input in so many is also read by a new process.
_SAMPLE: Final = 25
_TESTS: Final = Path(__file__).parent.parent
# Settings that name the file to which each input of a part is written.
_SETTINGS: Final = {
    "keyed.toml": '[proxy]\napi_keys_file = "keys.toml"\n',
    "profiled.toml": '[models.m]\npath = "tiny.gguf"\nprofile = "fuzzed"\n',
    "model.toml": '[models.m]\npath = "fuzzed.gguf"\n[models.n]\npath = "tiny.gguf"\n',
    "draft.toml": '[models.m]\npath = "tiny.gguf"\ndraft = "fuzzed.gguf"\n',
    "auto.toml": '[models.m]\npath = "tiny.gguf"\ndraft = "auto"\n',
}


def run(part: str, seed: int, limits: Limits, findings: Findings, home: Path) -> Report:
    corral = CorralCli(home)
    tiny_gguf.make(home / "tiny.gguf")
    for name, text in _SETTINGS.items():
        (home / name).write_text(text, "utf-8")
    make_case: Callable[[int, int], Case] = importlib.import_module(f"fuzz.{part}").case
    child: Child | None = None
    figures = Counter[str]()
    while (number := limits.take()) is not None:
        if child is None:
            child = Child(part, seed, home, corral.env)
            figures["processes"] += 1
        case = make_case(seed, number)
        found = child.tried(number)
        if number % _SAMPLE == 0 and not child.is_lost:
            figures["commands as processes"] += 1
            found += ran(corral, case.words(home)[0])
        _tell(findings, part, number, case, found)
        if child.is_used_up or any("MiB" in entry["what"] for entry in found):
            figures["hangs or deaths"] += child.is_lost
            child.end()
            child = None
    if child:
        child.end()
    return Report(part, limits.taken, {name: str(count) for name, count in figures.items()})


def _tell(
    findings: Findings, part: str, number: int, case: Case, found: Sequence[Mapping[str, str]]
) -> None:
    words = "; ".join(" ".join(words) for words in case.commands)
    example = Example(Path(case.path).name, case.data, f"{case.made_by}; {words}")
    for entry in found:
        findings.add(part, entry["what"], f"input {number}: {entry['detail']}", [example])


class Child:
    """A process that tests inputs by number.

    Attributes:
        is_lost: Whether it hangs or died.
    """

    def __init__(self, part: str, seed: int, home: Path, env: dict[str, str]) -> None:
        self._count = 0
        self.is_lost = False
        self._errors = home / "child.stderr"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fuzz.child", part, str(seed), str(home)],
                env={**env, "PYTHONPATH": f"{_TESTS}:{_TESTS.parent}", "COLUMNS": "100"},
                cwd=home,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )

    @property
    def is_used_up(self) -> bool:
        return self.is_lost or self._count >= _CASES_OF_A_CHILD

    def tried(self, number: int) -> list[dict[str, Any]]:
        """Return the problems of an input, including a hang or a crash."""
        self._count += 1
        line = self._asked(number)
        if not line:
            self.is_lost = True
            code = self._process.poll()
            how = "no answer" if code is None else f"exit code {code}"
            stderr = self._errors.read_text("utf-8", errors="replace")[-3000:]
            return [{"what": f"hangs or dies: {how}", "detail": stderr}]
        found: list[dict[str, Any]] = json.loads(line)
        return found

    def _asked(self, number: int) -> bytes:
        """Return the line printed for a number; empty if there is none."""
        assert self._process.stdin
        assert self._process.stdout
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{number}\n".encode())
            self._process.stdin.flush()
        # The first case includes the imports and the probe of the engine.
        queue_timeout_s = _HANG_S + (30 if self._count == 1 else 0)
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            return self._process.stdout.readline() if selector.select(queue_timeout_s) else b""

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()
