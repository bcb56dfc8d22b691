"""Tests inputs in a process with limits: `python -m fuzz.child PART SEED HOME`, numbers on stdin.

Prints one line of JSON for each number. The traceback of a case that hangs goes to stderr.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import resource
import sys
import time
import traceback
import unicodedata
from pathlib import Path
from typing import Any, Final

from fuzz.case import EXIT_CODES, Case
from typer.testing import CliRunner

from supervisor.cli.app import app

SECONDS: Final = 2.0
MEMORY_MIB: Final = 200.0
_ADDRESS_SPACE_BYTES: Final = 3 * 1024**3
_HANG_S: Final = 10.0
_TEXT_MAX: Final = 3000


def main() -> None:
    part, seed, home = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE_BYTES, _ADDRESS_SPACE_BYTES))
    module = importlib.import_module(f"fuzz.{part}")
    for line in sys.stdin:
        case = module.case(seed, int(line))
        found = [wrong for words in make(case, home) for wrong in tried(words)]
        print(json.dumps(found), file=answers, flush=True)


def make(case: Case, home: Path) -> tuple[tuple[str, ...], ...]:
    path = home / case.path
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    path.unlink(missing_ok=True)
    match case.made_by:
        case "fifo":
            os.mkfifo(path)
        case "directory":
            path.mkdir()
        case "link":
            path.symlink_to(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "sparse":
            path.write_bytes(case.data)
            os.truncate(path, 1024**4)
        case _:
            path.write_bytes(case.data)
            path.chmod(0o600)
    return case.words(home)


def tried(words: tuple[str, ...]) -> list[dict[str, Any]]:
    Path("/proc/self/clear_refs").write_text("5", "ascii")  # the peak of memory counts from now
    faulthandler.dump_traceback_later(_HANG_S)
    began_s = time.process_time()
    result = CliRunner().invoke(app, list(words))
    took_s = time.process_time() - began_s
    faulthandler.cancel_dump_traceback_later()
    peak_mib = _peak_mib()
    name = " ".join(words[:2])
    found = []
    if result.exception and not isinstance(result.exception, SystemExit):
        lines = traceback.format_exception(result.exception)
        last = f"{type(result.exception).__name__}: {str(result.exception)[:80]}"
        found.append({"what": f"{name}: {last}", "detail": _cut("".join(lines))})
    elif result.exit_code not in EXIT_CODES:
        found.append({"what": f"{name}: exit code {result.exit_code}", "detail": result.output})
    if took_s > SECONDS:
        found.append({"what": f"{name}: takes over {SECONDS:g} s", "detail": f"{took_s:.1f} s"})
    if peak_mib > MEMORY_MIB:
        found.append(
            {"what": f"{name}: takes over {MEMORY_MIB:g} MiB", "detail": f"{peak_mib:.0f}"}
        )
    if bad := sorted(filter(is_control_character, set(result.output))):
        found.append({"what": f"{name}: prints what commands a terminal", "detail": ascii(bad)})
    return found


def is_control_character(character: str) -> bool:
    """Return whether a character can move, colour or reverse text: controls, separators, direction.

    Source: Unicode's general categories and UAX 9; a mark of no width has the class BN.
    """
    category = unicodedata.category(character)
    if category == "Cf":
        return unicodedata.bidirectional(character) != "BN"
    return category in {"Cc", "Cs", "Zl", "Zp"} and character not in "\n\t"


def _cut(text: str) -> str:
    return text if len(text) < _TEXT_MAX else f"{text[:1000]}\n…\n{text[-2000:]}"


def _peak_mib() -> float:
    status = Path("/proc/self/status").read_text("ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


if __name__ == "__main__":
    main()
