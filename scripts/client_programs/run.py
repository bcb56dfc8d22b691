"""Run coding agents from npm on llama-corral, with a scripted model on the real engine.

Each gets a task with tools and another turn of the same conversation, must tell the user when the
context is full, and chats with SmolLM2 where its own prompt is small enough. All have a home of
their own, and nothing leaves this machine but the installation by npm.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from corral_cli import CorralCli

from scripts.client_programs import scripted_model
from scripts.client_programs.clients import CLIENTS, Client
from scripts.client_programs.npm import environment, install
from supervisor.host import download
from supervisor.host.paths import directories
from supervisor.output import table

COMMANDS: Final = ("cat notes.txt", "echo done > result.txt")
BIG: Final = ("cat big.txt", "tail -n 9999 big.txt", "head -n 9999 big.txt")
_WIDE_TOKENS: Final = 131_072
# What is left in the narrow context beside the client's own prompt.
_LEFT_TOKENS: Final = 4096
_BIG_WORDS: Final = 4000
_CALL_MAX_S: Final = 240
_SETTINGS: Final = """
[models.{name}]
path = "{path}"
[models.{name}.flags]
ctx-size = {ctx}
parallel = 1
threads = 2
cache-ram = 256
"""
# What a client says when the context is full: that, or a summary of its own.
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
    """What became of one check; `detail` is the end of what the client printed."""

    check: str
    is_met: bool
    detail: str


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", metavar="CLIENT")
    parser.add_argument("--keep", action="store_true", help="print what each client printed")
    options = parser.parse_args()
    chosen = [one for one in CLIENTS if not options.clients or one.program in options.clients]
    rows: list[tuple[str, str, str]] = []
    has_failed = False
    for client in chosen:
        for found in _checks(client, is_verbose=options.keep):
            has_failed |= not found.is_met
            rows.append((client.program, found.check, "yes" if found.is_met else found.detail))
    print(table(("CLIENT", "CHECK", ""), rows))
    return int(has_failed)


def _checks(client: Client, *, is_verbose: bool) -> list[Outcome]:
    programs = install(client.package)
    with tempfile.TemporaryDirectory(prefix="cl") as name:
        run = _Run(client, programs, Path(name), is_verbose=is_verbose)
        try:
            return run.all()
        finally:
            run.corral.end()


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
        (self._work / "notes.txt").write_text("The word is heron.\n")
        (self._work / "big.txt").write_text("heron and another bird\n" * (_BIG_WORDS // 4))

    def all(self) -> list[Outcome]:
        smollm2 = download.fetch(
            download.find_pin("smollm2"), directories().models, lambda *_: None
        )
        wide = scripted_model.make(self._models / "wide.gguf", smollm2, COMMANDS, ctx=_WIDE_TOKENS)
        self._serve([("wide", wide, _WIDE_TOKENS)])
        found = [self._task(), self._next_turn()]
        prompt_tokens = self._prompt_tokens()
        narrow_ctx = prompt_tokens + _LEFT_TOKENS
        narrow = scripted_model.make(self._models / "narrow.gguf", smollm2, BIG, ctx=narrow_ctx)
        self.corral.ok("stop")
        self._serve([("narrow", narrow, narrow_ctx), ("smollm2", smollm2, 8192)])
        found.append(self._full())
        if self._client.bare is not None:
            found.append(self._chat(self._client.bare))
        return found

    def _serve(self, models: Sequence[tuple[str, Path, int]]) -> None:
        tables = [_SETTINGS.format(name=name, path=path, ctx=ctx) for name, path, ctx in models]
        self.corral.configure("".join(tables))
        self.corral.ok("start")
        self._client.configure(self._home, self.corral.url, [name for name, _, _ in models])

    def _call(self, model: str, words: Sequence[str]) -> str:
        variables = self._client.variables(self.corral.url, model)
        try:
            done = subprocess.run(
                [self._programs / self._client.program, *words],
                cwd=self._work,
                env=environment(self._home, self._programs, variables),
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
            print(f"--- {self._client.program} {' '.join(words)}\n{said}", file=sys.stderr)
        return said

    def _task(self) -> Outcome:
        said = self._call("wide", self._client.first("wide", "Read notes.txt and tell the word."))
        has_written = (self._work / "result.txt").is_file()
        return _outcome("a task with tools", said, has_written and scripted_model.ANSWER in said)

    def _next_turn(self) -> Outcome:
        said = self._call("wide", self._client.again("wide", "And what was the word again?"))
        return _outcome("a next turn", said, scripted_model.ANSWER in said)

    def _full(self) -> Outcome:
        said = self._call("narrow", self._client.first("narrow", "Read big.txt, three times."))
        is_told = any(words in said.lower() for words in _FULL)
        return _outcome("says that the context is full, or compacts", said, is_told)

    def _chat(self, bare: Sequence[str]) -> Outcome:
        prompt = "What is the capital of France?"
        said = self._call("smollm2", [*self._client.first("smollm2", prompt), *bare])
        return _outcome("a chat with SmolLM2", said, "Paris" in said)

    def _prompt_tokens(self) -> int:
        finished = self.corral.events("request.finished")
        keys = ("prompt_tokens", "cached_tokens")
        return max(sum(int(one.get(key) or 0) for key in keys) for one in finished)


def _outcome(check: str, said: str, is_met: bool) -> Outcome:  # noqa: FBT001 (a value)
    return Outcome(check, is_met, " ".join(said.split())[-200:])


if __name__ == "__main__":
    sys.exit(main())
