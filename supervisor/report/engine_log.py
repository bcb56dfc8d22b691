"""The lines of an engine's log that hold no prompt. Pure.

Until an engine listens it has no prompt, so all lines of its load are kept. Then an engine writes
figures at its usual level; at higher ones, prompts, answers and grammars, over several lines, and
in errors what a client sent (build 10434). Which lines those are differs between builds, so the
others are recognised: they begin as the engine begins a line and have no word but those below. A
word of a prompt that is among these says nothing.

After a verbose engine no line can be trusted that looks like the beginning of the next run: a
prompt may contain one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

_LINE_MAX: Final = 2000
_RUN: Final = re.compile(r"\[llama-corral: run \d{1,9}, \d{4}-\d\d-\d\dT[\d:+.]{6,20}\] .*")
_VERBOSE: Final = re.compile(r"(?:[\d.]+ )?D [a-z]")
_LISTENING: Final = "listening on "
_SERVES: Final = re.compile(r"all slots are idle|\bget_availabl|\blaunch_slot|update_slots")
_OURS: Final = re.compile(r"\[llama-corral: the disk refused \d{1,20} bytes here\]")
_BEGINNING: Final = re.compile(
    r"(?:[\d.]+ )?(?:[IWE] )?(?:slot|srv|que|res|cmn|main|init|llama|ggml)"
)
_WORD: Final = re.compile(r"[^\W\d_]+")
# Words of build 10434 at its usual level, and of earlier ones.
_WORDS_TEXT: Final = """
a active add adding all API are as async at availabl available batch before by bytes cache cached
can cancel cancelled checkpoint checkpoints child chunk cleaning cmn command common context
count created creating D defrag does done due E each empty entries EOF erase erased est eval
evaluate evaluating exceed exceeds exit exiting f fault fill finished for force forced found
fraction free freed from full fused gen GET get graphs have HTTP http I id idle in index init
Invalid invalid is it K k keep Key key kv large last launch LCP least left limit limits llama
load loaded log looking lower LRU main matching max memory metrics MiB model monitoring more ms
n need needed new no not now of on one only operator out over past per ping pos POST previous
print process processing progress prompt prompts quant que queue rather reached ready received
release releasing res reset response restart restored restoring result reused s save saved
saving second seconds selected sent seq server set shift signal SIGTERM sim similarity since
size slot slots speed srv start state stdin stop stopped stopping success successfully swa t
task tasks tg than the them there this thread time timing timings to token tokens too took total
truncated unauthorized until up update updated updating used using V W waiting warm was way will
with within would x
"""
_WORDS: Final = frozenset(_WORDS_TEXT.split())


@dataclass(frozen=True, slots=True)
class CleanLog:
    """`left_out`: how many lines; `is_verbose`: whether the engine wrote more than usual."""

    lines: tuple[str, ...]
    left_out: int
    is_verbose: bool


def without_prompts(lines: Iterable[str]) -> CleanLog:
    """Return the lines of a log, read from its beginning, that hold no prompt."""
    reader = _Reader()
    kept = tuple(reader.read(lines))
    return CleanLog(kept, reader.left_out, reader.is_verbose)


class _Reader:
    def __init__(self) -> None:
        self.left_out = 0
        self.is_verbose = False
        self._is_loading = False

    def read(self, lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            if self._is_kept(line):
                yield line[:_LINE_MAX]
            else:
                self.left_out += 1

    def _is_kept(self, line: str) -> bool:
        if _RUN.fullmatch(line) and not self.is_verbose:
            self._is_loading = True
            return True
        if self._is_loading:
            is_listening = _LISTENING in line
            self._is_loading = not (is_listening or _SERVES.search(line))
            return self._is_loading or is_listening or is_figures(line)
        self.is_verbose = self.is_verbose or bool(_VERBOSE.match(line))
        return bool(_OURS.fullmatch(line)) or is_figures(line)


def is_figures(line: str) -> bool:
    """Return whether a line has figures and known words only."""
    if len(line) > _LINE_MAX or not _BEGINNING.match(line):
        return False
    return all(word in _WORDS for word in _WORD.findall(line))
