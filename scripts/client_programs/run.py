"""Run client programs with the settings that `corral connect --write` gives them.

Coding agents get a task with tools and another turn of the same conversation, from a scripted model
on the real engine, and must tell the user when the context is full. Those whose own prompt is small
enough chat with SmolLM2. At last `--undo` must leave the settings of the user as they were. Each
has its own home directory, and nothing leaves this machine but the installation by npm and pip.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from support.corral_cli import CorralCli, until

from scripts.client_programs import scripted_model
from scripts.client_programs.clients import CLIENTS, Client, own_files
from scripts.client_programs.packages import environment, install
from supervisor.clients.programs import CLIENTS as CLIENT_PROGRAMS
from supervisor.models import pinned
from supervisor.output import table
from supervisor.system.paths import directories

COMMANDS: Final = ("cat notes.txt", "echo done > result.txt")
BIG: Final = ("cat big.txt", "tail -n 9999 big.txt", "head -n 9999 big.txt")
_WIDE_TOKENS: Final = 131_072
# The rest of the narrow context beside the client's own prompt.
_LEFT_TOKENS: Final = 4096
_BIG_WORDS: Final = 4000
_CALL_MAX_S: Final = 240
_CHATS_MAX: Final = 4
_ADDRESS: Final = "127.0.0.1"
_VERBS: Final = ("move", "freeze")
_AUTHOR: Final = ("-c", "user.name=corral", "-c", "user.email=corral@localhost")
_SETTINGS: Final = """
[models.{name}]
path = "{path}"
[models.{name}.flags]
ctx-size = {ctx}
parallel = {slots}
threads = 2
cache-ram = 256
"""
# A client's output when the context is full: that message, or a summary.
_FULL: Final = (
    "too long",
    "context window",
    "context size",
    "context length",
    "compact",
    "ran out",
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one check; `detail` is the end of the client's output."""

    check: str
    is_met: bool
    detail: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", metavar="CLIENT")
    parser.add_argument(
        "--sessions",
        type=int,
        metavar="N",
        help="only measure what N sessions find in the cache, with prompt rules and without",
    )
    parser.add_argument(
        "--capture", type=Path, metavar="DIR", help="with --sessions: keep the requests there"
    )
    parser.add_argument("--keep", action="store_true", help="print what each client printed")
    options = parser.parse_args()
    chosen = [client for client in CLIENTS if not options.clients or client.name in options.clients]
    if options.sessions:
        for client in chosen:
            capture = options.capture and options.capture / f"{client.name}.jsonl"
            measured = _measure(client, options.sessions, capture, is_verbose=options.keep)
            print(table(_MEASURED, measured), flush=True)
        return 0
    rows: list[tuple[str, str, str]] = []
    has_failed = False
    for client in chosen:
        for found in _checks(client, is_verbose=options.keep):
            has_failed |= not found.is_met
            rows.append((client.name, found.check, "yes" if found.is_met else found.detail))
    print(table(("CLIENT", "CHECK", ""), rows))
    return int(has_failed)


_MEASURED: Final = (
    "CLIENT",
    "PROMPT RULES",
    "PROMPTS",
    "TOKENS",
    "FOUND",
    "NEW",
    "TOKENS",
    "FOUND",
)


def _measure(
    client: Client, sessions: int, capture: Path | None, *, is_verbose: bool
) -> list[tuple[object, ...]]:
    """Return the prompts of all sessions but the first, and what the cache had of them.

    Without rules, with those of `corral connect`, with those that `corral explain` then proposes,
    and with blocks besides these. The last three columns are of the first prompts of conversations.
    """
    programs = install(client.package, is_python=client.is_python)
    known = next(program for program in CLIENT_PROGRAMS if program.name == client.name)
    left, rows = [(), tuple(known.prompt_rules)], dict[Sequence[str], tuple[object, ...]]()
    while left:
        if (rules := left.pop(0)) in rows:
            continue
        with tempfile.TemporaryDirectory(prefix="cl") as name:
            run = _Run(client, programs, Path(name), is_verbose=is_verbose)
            try:
                prompts = run.sessions(sessions, rules, None if rows else capture)
                if not rows:
                    found = run.corral.data("explain", "--client", _ADDRESS)
                    proposed = tuple(found.get("rules", ()))
                    left += [proposed, *((*proposed, f"{verb}:block") for verb in _VERBS)]
            finally:
                run.corral.end()
        figures: list[object] = []
        for part in (prompts, [prompt for prompt in prompts if not prompt.is_continued]):
            tokens, cached = sum(p.tokens for p in part), sum(p.cached for p in part)
            figures += [len(part), tokens, f"{cached / max(1, tokens):.3f}"]
        rows[rules] = (client.name, " ".join(rules) or "none", *figures)
    return [*rows.values()]


def _checks(client: Client, *, is_verbose: bool) -> list[Outcome]:
    programs = install(client.package, is_python=client.is_python)
    with tempfile.TemporaryDirectory(prefix="cl") as name:
        run = _Run(client, programs, Path(name), is_verbose=is_verbose)
        try:
            return run.all()
        finally:
            run.corral.end()


class _Prompt(NamedTuple):
    tokens: int
    cached: int
    is_continued: bool


class _Run:
    """All checks of one client, on one daemon."""

    def __init__(
        self, client: Client, programs: Path, directory: Path, *, is_verbose: bool
    ) -> None:
        self._client = client
        self._programs = programs
        self._home = directory / "home"
        self._work = directory / "work"
        self._models = directory
        self._is_verbose = is_verbose
        self.corral = CorralCli(directory)
        self._home.mkdir()
        self._work.mkdir()
        self.corral.env["HOME"] = str(self._home)
        for name in ("XDG_CONFIG_HOME", "CLAUDE_CONFIG_DIR", "CODEX_HOME", "OPENCODE_CONFIG"):
            self.corral.env.pop(name, None)
        for path, text in own_files(client, self._home).items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
        (self._work / "notes.txt").write_text("The word is heron.\n")
        (self._work / "big.txt").write_text("heron and another bird\n" * (_BIG_WORDS // 4))

    def sessions(
        self, count: int, rules: Sequence[str], capture: Path | None = None
    ) -> list[_Prompt]:
        """Run sessions of two turns, each in a new repository; return the prompts of all but one.

        `capture`: a file for the requests.
        """
        smollm2 = pinned.fetch(pinned.find_pin("smollm2"), directories().models, lambda *_: None)
        wide = scripted_model.make(self._models / "wide.gguf", smollm2, COMMANDS, ctx=_WIDE_TOKENS)
        settings = f'[proxy.prompt_rules]\n"{_ADDRESS}" = {list(rules)}\n' if rules else ""
        # One slot beside, for titles.
        self._serve([("wide", wide, _WIDE_TOKENS)], settings, slots=2)
        capturing: subprocess.Popen[bytes] | None = None
        if capture:
            argv = self.corral.argv("capture", "--model", "wide", "--output", str(capture))
            capturing = subprocess.Popen(argv, env=self.corral.env)
            until(lambda: self.corral.events("capture.started"))
        first = 0
        for number in range(count):
            self._work = self._models / f"project{number}"
            self._work.mkdir()
            (self._work / "notes.txt").write_text("The word is heron.\n")
            for words in (("init", "-q"), ("add", "."), (*_AUTHOR, "commit", "-q", "-m", "notes")):
                subprocess.run(["git", *words], cwd=self._work, check=True)  # noqa: S607
            self._call(self._client.first("wide", f"Read notes.txt and tell word {number}."))
            self._call(self._client.again("wide", "And what was the word again?"))
            first = first or len(self.corral.events("request.finished"))
        if capturing:
            self.corral.ok("capture", "--stop")
            capturing.wait()
        return [
            _Prompt(
                (request.get("prompt_tokens") or 0) + (request.get("cached_tokens") or 0),
                request.get("cached_tokens") or 0,
                bool((request.get("cache") or {}).get("is_continued")),
            )
            for request in self.corral.events("request.finished")[first:]
        ]

    def all(self) -> list[Outcome]:
        smollm2 = pinned.fetch(pinned.find_pin("smollm2"), directories().models, lambda *_: None)
        found = self._agent(smollm2) if self._client.has_tools else []
        if self._client.bare is not None:
            self._serve([("smollm2", smollm2, 8192)])
            found += self._chat(self._client.bare)
        return [*found, self._undo()]

    def _agent(self, smollm2: Path) -> list[Outcome]:
        wide = scripted_model.make(self._models / "wide.gguf", smollm2, COMMANDS, ctx=_WIDE_TOKENS)
        self._serve([("wide", wide, _WIDE_TOKENS)])
        found = [self._task(), self._next_turn()]
        prompt_tokens = self._prompt_tokens()
        narrow_ctx = prompt_tokens + _LEFT_TOKENS
        narrow = scripted_model.make(self._models / "narrow.gguf", smollm2, BIG, ctx=narrow_ctx)
        self._serve([("narrow", narrow, narrow_ctx)])
        return [*found, self._full()]

    def _serve(
        self, models: Sequence[tuple[str, Path, int]], more: str = "", slots: int = 1
    ) -> None:
        tables = [
            _SETTINGS.format(name=name, path=path, ctx=ctx, slots=slots)
            for name, path, ctx in models
        ]
        if self.corral.is_running():
            self.corral.ok("stop")
        self.corral.configure("".join([*tables, more]))
        self.corral.ok("start")
        self.corral.ok("connect", self._client.name, "--write")

    def _undo(self) -> Outcome:
        self.corral.ok("connect", self._client.name, "--undo")
        found = {path: path.read_text("utf-8") for path in own_files(self._client, self._home)}
        is_same = found == own_files(self._client, self._home)
        return _outcome("--undo restores the user's files", str(found), is_same)

    def _call(self, words: Sequence[str]) -> str:
        try:
            done = subprocess.run(
                [self._programs / self._client.name, *words],
                cwd=self._work,
                env=environment(self._home, self._programs, self._client.variables),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_CALL_MAX_S,
                check=False,
            )
            said = done.stdout + done.stderr
        except subprocess.TimeoutExpired as error:
            said = f"did not end within {_CALL_MAX_S} s: {error.stdout!r}"
        if self._is_verbose:
            print(f"--- {self._client.name} {' '.join(words)}\n{said}", file=sys.stderr)
        return said

    def _task(self) -> Outcome:
        said = self._call(self._client.first("wide", "Read notes.txt and tell the word."))
        has_written = (self._work / "result.txt").is_file()
        return _outcome("a task with tools", said, has_written and scripted_model.ANSWER in said)

    def _next_turn(self) -> Outcome:
        said = self._call(self._client.again("wide", "And what was the word again?"))
        return _outcome("a next turn", said, scripted_model.ANSWER in said)

    def _full(self) -> Outcome:
        said = self._call(self._client.first("narrow", "Read big.txt, three times."))
        is_told = any(words in said.lower() for words in _FULL)
        return _outcome("says that the context is full, or compacts", said, is_told)

    def _chat(self, bare: Sequence[str]) -> list[Outcome]:
        first = self._client.first("smollm2", "What is the capital of France?")
        found = [self._told("a chat with SmolLM2", [*first, *bare], "Paris")]
        if not self._client.has_tools:
            again = self._client.again("smollm2", "What is the capital of Italy?")
            found.append(self._told("its next turn", [*again, *bare], "Rome"))
        return found

    def _told(self, check: str, words: Sequence[str], answer: str) -> Outcome:
        said = ""
        for _ in range(_CHATS_MAX):  # its temperature is not 0
            if answer not in said:
                said = self._call(words)
        return _outcome(check, said, answer in said)

    def _prompt_tokens(self) -> int:
        finished = self.corral.events("request.finished")
        keys = ("prompt_tokens", "cached_tokens")
        return max(sum(int(request.get(key) or 0) for key in keys) for request in finished)


def _outcome(check: str, said: str, is_met: bool) -> Outcome:  # noqa: FBT001 (a value)
    return Outcome(check, is_met, " ".join(said.split())[-200:])


if __name__ == "__main__":
    sys.exit(main())
