"""Writes a bug report: one archive, mode 0600, without secrets, with prompts only on request."""

from __future__ import annotations

import io
import os
import platform
import re
import shutil
import sys
import tarfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import orjson

from supervisor import __version__
from supervisor.engine.log_file import LINE_MAX_BYTES, LineSplitter
from supervisor.errors import DiskFull
from supervisor.system import machine
from supervisor.system.files import create_new, open_regular
from supervisor.system.machine import cpu_name
from supervisor.system.paths import Directories


@dataclass(frozen=True, slots=True)
class Part:
    """A file of the report; `note` is a sentence about the lines left out."""

    name: str
    text: str
    note: str | None = None


HIDDEN: Final = "[hidden]"
# Shorter names, and these names, occur in ordinary words and paths.
_NAME_MIN: Final = 3
_COMMON: Final = frozenset({"root", "localhost", "user", "llama", "corral"})
_SECRET_MIN: Final = 6
_PASSWORD: Final = re.compile(r"://[^/@\s\"']{1,256}@")
# USER:PASSWORD@ without a scheme, as curl and git accept it.
_USER: Final = re.compile(r"(?<![\w.+/@-])[\w.+-]{1,64}:[^\s/@:\"']{1,256}@(?=\[?\w)")
# Options of llama-server and of other programs; `--api-key-file` names a file and is kept.
_OPTION: Final = re.compile(r"(--?[a-z][a-z-]{0,40}(?:key|token|password|secret))([ =])(?=\S)\S+")
_BEARER: Final = re.compile(r"\b(Bearer|Basic) [A-Za-z0-9._~+/=-]{6,}")
_KEY: Final = re.compile(r"\b(sk|hf|ghp|key)([-_])[A-Za-z0-9_-]{12,}")


def anonymize(text: str, home: str, user: str, host: str, secrets: Sequence[str] = ()) -> str:
    """Remove secrets and personal names; `secrets`: further texts to hide, such as settings."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SECRET_MIN:
            text = text.replace(secret, HIDDEN)
    text = _PASSWORD.sub(f"://{HIDDEN}@", text)
    text = _USER.sub(f"{HIDDEN}@", text)
    text = _OPTION.sub(rf"\1\2{HIDDEN}", text)
    text = _BEARER.sub(rf"\1 {HIDDEN}", text)
    text = _KEY.sub(HIDDEN, text)
    if len(home) > 1:
        text = text.replace(home, "~")
    for name, instead in ((host, "HOST"), (user, "USER")):
        if len(name) >= _NAME_MIN and name.lower() not in _COMMON:
            text = re.sub(rf"(?<![^\W_]){re.escape(name)}(?![^\W_])", instead, text)
    return text


_SECRET: Final = re.compile(r"(?:^|[._-])(?:api[_-]?key|key|token|password|secret|header)s?$")
_TEXTS: Final = re.compile(r"\.variants\.|(?:^|\.)hooks\.|chat[-_]template|system[-_]prompt")


def without_secrets(
    values: Mapping[str, Any], origins: Mapping[str, str], *, with_prompts: bool
) -> list[str]:
    """Return `key = value  # origin` lines of the settings in `origins`, by dotted key.

    `with_prompts`: keep texts that become part of prompts.
    """
    return [
        f"{key} = {_report_value(key, value, with_prompts=with_prompts)!r}  # {origins[key]}"
        for key, value in values.items()
        if key in origins
    ]


def _report_value(key: str, value: Any, *, with_prompts: bool) -> Any:
    if isinstance(value, bool | int | float) or value is None:
        return value
    is_hidden = _SECRET.search(key) or (_TEXTS.search(key) and not with_prompts)
    return HIDDEN if is_hidden else value


_DISTRIBUTION: Final = "llama-corral"


def machine_facts(where: Directories) -> dict[str, Any]:
    here = asdict(machine.read())
    here["cpu_flags"] = sorted(here["cpu_flags"])
    return {
        "system": platform.platform(),
        "distribution": _distribution(),
        "processor": cpu_name(),
        **here,
        "load_average": os.getloadavg(),
        "directories": {name: _directory(path) for name, path in where.roots.items()},
    }


def versions() -> dict[str, str]:
    return {"llama-corral": __version__, "python": sys.version, **dict(sorted(_dependencies()))}


def _dependencies() -> Iterator[tuple[str, str]]:
    for line in metadata.requires(_DISTRIBUTION) or ():
        name = line.partition(";")[0].rstrip("0123456789.<>=!~, ")
        if "extra ==" not in line:
            try:
                yield name, metadata.version(name)
            except metadata.PackageNotFoundError:
                yield name, "missing"


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        return ""


def _directory(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"path": str(path), "exists": False}
    disk = shutil.disk_usage(path)
    mode = f"{path.stat().st_mode & 0o7777:o}"
    return {"path": str(path), "mode": mode, "disk_free_bytes": disk.free, "disk_bytes": disk.total}


def write_archive(path: Path, folder: str, parts: Sequence[Part]) -> int:
    """Write the parts below a folder; return the size in bytes.

    Raises AccessDenied if the path exists or cannot be created, or DiskFull.
    """
    descriptor = create_new(path)
    try:
        with os.fdopen(descriptor, "wb") as file, tarfile.open(mode="w:gz", fileobj=file) as tar:
            for part in parts:
                content = part.text.encode(errors="replace")
                # Without the names of the user and the group.
                member = tarfile.TarInfo(f"{folder}/{part.name}")
                member.size, member.mode = len(content), 0o600
                member.mtime = int(time.time_ns() / 1e9)
                tar.addfile(member, io.BytesIO(content))
    except OSError as error:
        path.unlink(missing_ok=True)
        raise DiskFull(
            f"cannot write {path}: {error.strerror}", hint="name a file on another disk"
        ) from error
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path.stat().st_size


# The logs of the daemon and its engines, without prompts.
#
# Daemon: only fields that are known to be safe are kept; a new field is left out until it is listed
# here.
#
# Engines: an engine has no prompt before it listens, so all lines of its load are kept. After that
# it logs figures at its usual level. At higher levels it also logs prompts, answers and grammars,
# over several lines, and errors quote the request (build 10434). These lines differ between builds,
# so the harmless ones are recognised instead: they begin as the engine begins a line, and contain
# only the words listed below. A prompt's word that is in this list reveals nothing.
#
# After a verbose engine, a line that looks like the beginning of the next run is not trusted: a
# prompt may contain one.

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
    "canary.", "daemon.", "engine.", "instance.", "model.", "node.", "settings.", "slots.",
    "worker.",
)  # fmt: skip
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
_WORDS: Final = frozenset(Path(__file__).with_name("log_words.txt").read_text("ascii").split())


class LogFilter:
    """Filters one engine's log, from its beginning, to the lines without prompts."""

    def __init__(self) -> None:
        self.left_out = 0  # lines left out so far
        self.is_verbose = False  # whether the engine logged at a higher level than usual
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
        log_filter, lines = LogFilter(), _lines(path)
        kept = [*(lines if with_prompts else log_filter.read(lines))]
        is_verbose = is_verbose or log_filter.is_verbose
        parts.append(_part(path.name, kept, _ENGINE_LINES_MAX, log_filter.left_out))
    events, left_out = [*_lines(where.daemon_log)], 0
    if not with_prompts:
        events, left_out = without_texts(events, has_quotes=is_verbose)
    parts.append(_part("daemon.jsonl", events, _DAEMON_LINES_MAX, left_out))
    return parts, is_verbose


def _part(name: str, lines: Sequence[str], most: int, left_out: int) -> Part:
    noun = "line that may hold" if left_out == 1 else "lines that may hold"
    note = f"{left_out} {noun} a prompt or an answer" if left_out else None
    return Part(f"logs/{name}", "\n".join([*lines[-most:], ""]), note)


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
