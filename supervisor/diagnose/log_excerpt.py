"""Reads the logs of the daemon and its engines, without prompts.

Daemon: only fields that are known to be safe are kept; a new field is left out until it is listed
here.

Engines: an engine has no prompt before it listens, so all lines of its load are kept. After that it
logs figures at its usual level. At higher levels it also logs prompts, answers and grammars, over
several lines, and errors quote the request (build 10434). These lines differ between builds, so the
harmless ones are recognised instead: they begin as the engine begins a line, and contain only the
words listed below. A prompt's word that is in this list reveals nothing.

After a verbose engine, a line that looks like the beginning of the next run is not trusted: a
prompt may contain one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import orjson

from supervisor.diagnose.report import Part
from supervisor.engine.log_file import LINE_MAX_BYTES, LineSplitter
from supervisor.system.files import open_regular
from supervisor.system.paths import Directories

LEFT_OUT: Final = "[left out]"
_SAFE_TEXT: Final = """
added after aliases before cancelled cause changed code devices ended_at engine event
fallback_for fault hook how id instance kept key kind level model models node nodes origin phase
priority profile removed request run settings signal stage status task timestamp value version
worker workers
"""
_SAFE: Final = frozenset(_SAFE_TEXT.split())
# Fields with our own sentences, in the events below.
_OWN_SENTENCES: Final = frozenset({"error", "hint", "reason"})
_OUR_EVENTS: Final = (
    "canary.",
    "daemon.",
    "engine.",
    "instance.",
    "model.",
    "node.",
    "settings.",
    "slots.",
    "worker.",
)
# One of our sentences, which ends with a line of the engine.
_QUOTED: Final = re.compile(r"(its last error: ).*", re.DOTALL)
_FRAME: Final = re.compile(r'  File "[^"]{1,400}", line \d{1,9}, in [\w<>.]{1,200}')
_ERROR: Final = re.compile(r"[A-Za-z_][\w.]{0,100}(?=\(|:|$)")


def without_texts(lines: Iterable[str], *, has_quotes: bool) -> tuple[list[str], int]:
    """Return the events of the daemon's log, and how many lines were no events.

    `has_quotes`: our own sentences may quote a prompt, from the log of a verbose engine.
    """
    kept, left_out = [], 0
    for line in lines:
        event = _read(line)
        if event is None:
            left_out += bool(line.strip())
        else:
            kept.append(orjson.dumps(clean_event(event, has_quotes=has_quotes)).decode())
    return kept, left_out


def clean_event(event: Mapping[str, Any], *, has_quotes: bool) -> dict[str, Any]:
    name = str(event.get("event"))
    return {key: _clean(name, key, value, has_quotes) for key, value in event.items()}


def cut_quote(text: str) -> str:
    """Remove the engine's line from the end of one of our sentences."""
    return _QUOTED.sub(rf"\1{LEFT_OUT}", text)


def _clean(name: str, key: str, value: Any, has_quotes: bool) -> Any:  # noqa: FBT001
    if value is None or isinstance(value, bool | int | float) or key in _SAFE:
        return value
    if name == "task.failed" and key == "traceback":
        return "\n".join(_FRAME.findall(str(value)))
    if name == "task.failed" and key == "error":
        found = _ERROR.search(str(value).rpartition(": ")[2] or str(value))
        return found[0] if found else LEFT_OUT
    if key in _OWN_SENTENCES and name.startswith(_OUR_EVENTS) and not has_quotes:
        return cut_quote(str(value))
    return LEFT_OUT


def _read(line: str) -> dict[str, Any] | None:
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) and "event" in found else None


_LINE_MAX: Final = 2000
_RUN: Final = re.compile(r"\[llama-corral: run \d{1,9}, \d{4}-\d\d-\d\dT[\d:+.]{6,20}\] .*")
_VERBOSE: Final = re.compile(r"(?:[\d.]+ )?D [a-z]")
_LISTENING: Final = "listening on "
_SERVES: Final = re.compile(r"all slots are idle|\bget_availabl|\blaunch_slot|update_slots")
_OUR_LINES: Final = re.compile(r"\[llama-corral: the disk refused \d{1,20} bytes here\]")
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


class LogFilter:
    """Filters one engine's log, from its beginning, to the lines without prompts.

    `left_out`: lines left out so far; `is_verbose`: the engine logged at a higher level than usual.
    """

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
        return bool(_OUR_LINES.fullmatch(line)) or is_figures(line)


def is_figures(line: str) -> bool:
    """Return whether a line has only figures and known words."""
    if len(line) > _LINE_MAX or not _BEGINNING.match(line):
        return False
    return all(word in _WORDS for word in _WORD.findall(line))


_BLOCK_BYTES: Final = 1024**2
# A log is rotated before it is larger.
_FILE_MAX_BYTES: Final = 17 * 1024**2
_ENGINE_LINES_MAX: Final = 3000
_DAEMON_LINES_MAX: Final = 5000
_FILES_MAX: Final = 64


def read_logs(where: Directories, *, with_prompts: bool) -> tuple[list[Part], bool]:
    """Return the logs, and whether an engine was verbose, so that its log has clients' texts."""
    parts, is_verbose = [], False
    for path in list(where.engine_logs().values())[:_FILES_MAX]:
        name = f"logs/{path.name}"
        if with_prompts:
            parts.append(_part(name, _lines(path), _ENGINE_LINES_MAX))
            continue
        log_filter = LogFilter()
        lines = list(log_filter.read(_lines(path)))
        is_verbose = is_verbose or log_filter.is_verbose
        parts.append(_part(name, lines, _ENGINE_LINES_MAX, log_filter.left_out))
    daemon = _lines(where.daemon_log)
    if with_prompts:
        parts.append(_part("logs/daemon.jsonl", daemon, _DAEMON_LINES_MAX))
    else:
        events, left_out = without_texts(daemon, has_quotes=is_verbose)
        parts.append(_part("logs/daemon.jsonl", events, _DAEMON_LINES_MAX, left_out))
    return parts, is_verbose


def _part(name: str, lines: Iterable[str], most: int, left_out: int = 0) -> Part:
    kept = list(lines)[-most:]
    noun = "line that may hold" if left_out == 1 else "lines that may hold"
    note = f"{left_out} {noun} a prompt or an answer" if left_out else None
    return Part(name, "\n".join([*kept, ""]), note)


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a log; none if it cannot be read."""
    splitter = LineSplitter(LINE_MAX_BYTES)
    try:
        with open_regular(path) as file:
            left_bytes = _FILE_MAX_BYTES
            while left_bytes > 0 and (block := file.read(min(_BLOCK_BYTES, left_bytes))):
                left_bytes -= len(block)
                for line in splitter.feed(block):
                    yield line.rstrip(b"\r").decode(errors="replace")
    except OSError:
        return
