"""Gives files to commands in child processes: settings, keys, profiles, GGUF."""

from __future__ import annotations

import importlib
import json
import selectors
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import tiny_gguf
from end_to_end.home import Corral
from fuzz.case import Case
from fuzz.finding import Example, Findings, Limits, Report

# Over this by the clock on the wall, a case hangs; the limit of 2 s is counted in processor time.
_HANG_S: Final = 15.0
_CASES_OF_A_CHILD: Final = 500
_TESTS: Final = Path(__file__).parent.parent
# Settings that name the file which each input of a part is written to.
_SETTINGS: Final = {
    "keyed.toml": '[proxy]\nkeys_file = "keys.toml"\n',
    "profiled.toml": '[models.m]\npath = "tiny.gguf"\nprofile = "fuzzed"\n',
    "model.toml": '[models.m]\npath = "fuzzed.gguf"\n[models.n]\npath = "tiny.gguf"\n',
    "draft.toml": '[models.m]\npath = "tiny.gguf"\ndraft = "fuzzed.gguf"\n',
    "auto.toml": '[models.m]\npath = "tiny.gguf"\ndraft = "auto"\n',
}


def run(part: str, seed: int, limits: Limits, findings: Findings, home: Path) -> Report:
    """Try inputs of a part until time or number is used up."""
    corral = Corral(home)
    tiny_gguf.make(home / "tiny.gguf")
    for name, text in _SETTINGS.items():
        (home / name).write_text(text, "utf-8")
    child: Child | None = None
    children = hangs = 0
    module = importlib.import_module(f"fuzz.{part}")
    while (number := limits.take()) is not None:
        if child is None:
            child, children = Child(part, seed, home, corral.env), children + 1
        found = child.tried(number)
        hangs_now = found is None
        hangs += hangs_now
        if found is None:
            why = child.end()
            found = [{"what": f"hangs or dies: {why[0]}", "detail": why[1]}]
        if hangs_now or child.is_used_up or any("MiB" in one["what"] for one in found):
            child.end()
            child = None
        case: Case = module.case(seed, number)
        for one in found:
            words = "; ".join(" ".join(words) for words in case.commands)
            example = Example(Path(case.path).name, case.data, f"{case.made_by}; {words}")
            findings.add(part, one["what"], f"input {number}: {one['detail']}", [example])
    if child:
        child.end()
    return Report(part, limits.taken, {"processes": str(children), "hangs or deaths": str(hangs)})


class Child:
    """A process that tries inputs by number."""

    def __init__(self, part: str, seed: int, home: Path, env: dict[str, str]) -> None:
        self._count = 0
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
        """Tell whether it has tried so many that its memory says little any more."""
        return self._count >= _CASES_OF_A_CHILD

    def tried(self, number: int) -> list[dict[str, Any]] | None:
        """Return what is wrong with an input; None where the child hangs or died."""
        self._count += 1
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.stdin.write(f"{number}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        # The first case pays for the imports, and for asking the engine what it can do.
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(_HANG_S + (30 if self._count == 1 else 0)):
                return None
        line = self._process.stdout.readline()
        found: list[dict[str, Any]] | None = json.loads(line) if line else None
        return found

    def end(self) -> tuple[str, str]:
        """Kill it; return how it ended, and what it wrote to stderr."""
        code = self._process.poll()
        self._process.kill()
        self._process.communicate()
        told = self._errors.read_text("utf-8", errors="replace")
        how = "no answer" if code is None else f"exit code {code}"
        return how, f"{how}\n{told[-3000:]}"
