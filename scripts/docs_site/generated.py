"""The parts of the documentation that the code decides: `scripts/docs --write` puts them there.

A part stands between two comments, `<!-- NAME: written by scripts/docs --write -->` and
`<!-- end of NAME -->`. The text between them is replaced.
"""

from __future__ import annotations

import argparse
import inspect
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import typer

from proxy.upstream.endpoint_kinds import ENDPOINTS
from supervisor.cli.app import app
from supervisor.daemon.control_client import OPERATIONS, Operation
from supervisor.engine.exit_cause import FailureCause, Table, patterns
from supervisor.engine.states import (
    AFTER_EXIT,
    NOT_FAILURES,
    STOP_REASONS,
    TRANSITIONS,
    WITHOUT_PROCESS,
    Event,
    State,
)
from supervisor.events import EVENTS
from supervisor.settings.reference import SettingReference, settings_reference

ROOT: Final = Path(__file__).parents[2]
_PATTERN: Final = re.compile(r"\{(\w+):[^}]*\}+")
_GROUP: Final = re.compile(r"(?:\{\w+(?:!r)?\})+")
_PART: Final = re.compile(
    r"(<!-- ([\w ]+): written by scripts/docs --write -->\n).*?(<!-- end of \2 -->)", re.DOTALL
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/docs", description="Build the documentation.")
    wanted = parser.add_mutually_exclusive_group()
    wanted.add_argument("directory", nargs="?", default="site", help="default: site")
    wanted.add_argument(
        "--write", action="store_true", help="rewrite the generated parts of the Markdown"
    )
    wanted.add_argument(
        "--check", action="store_true", help="compare these parts, and see that the site builds"
    )
    arguments = parser.parse_args()
    stale = [path for path in files() if path.read_text("utf-8") != current(path)]
    if arguments.write:
        for path in stale:
            path.write_text(current(path), "utf-8")
            print(f"written: {path.relative_to(ROOT)}")
    elif not arguments.check:
        build(arguments.directory)
    elif stale:
        names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
        sys.exit(f"generated parts differ from the code: {names}; run scripts/docs --write")
    else:
        with tempfile.TemporaryDirectory() as directory:
            build(directory)


def build(directory: str) -> None:
    """Build the site; exit with the messages if a page or a link has a problem."""
    mkdocs = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    config = ["--config-file", "scripts/docs_site/mkdocs.yml"]
    site = ["--site-dir", str(Path(directory).resolve())]
    built = subprocess.run([*mkdocs, *config, *site], cwd=ROOT, capture_output=True, check=False)
    if built.returncode:
        sys.exit(f"{built.stdout.decode()}{built.stderr.decode()}")


def files() -> list[Path]:
    """Return all files of the documentation."""
    return [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*/DESIGN.md"))]


def current(path: Path) -> str:
    """Return the text of a file with all of its parts as the code has them.

    Raises:
        KeyError: A comment names a part that does not exist.
    """
    return _PART.sub(
        lambda part: f"{part[1]}\n{PARTS[part[2]]()}\n\n{part[3]}", path.read_text("utf-8")
    )


def settings() -> str:
    """All settings of corral.toml."""
    tables: dict[tuple[str, ...], list[SettingReference]] = {}
    for setting in settings_reference():
        tables.setdefault(setting.key[:-1], []).append(setting)
    return "\n\n".join(_table_of_settings(*table) for table in tables.items())


def _table_of_settings(table: tuple[str, ...], rows: list[SettingReference]) -> str:
    title = f"`[{'.'.join(table)}]`" if table else "Outside of tables"
    head = "| key | value | default | meaning |\n| --- | --- | --- | --- |"
    return "\n".join([f"## {title}\n", head, *map(_setting_row, rows)])


def _setting_row(setting: SettingReference) -> str:
    kind = _cell(setting.kind + (f"; {setting.limits}" if setting.limits else ""))
    default = "required" if setting.is_required else _value(setting.default)
    return f"| `{setting.key[-1]}` | {kind} | {default} | {_cell(setting.description)} |"


def _value(default: object) -> str:
    if default is None or default in ([], ""):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def commands() -> str:
    """All commands with their options."""
    helps = _helps(typer.main.get_command(app))
    return "\n\n".join(f"## corral {name}\n\n```text\n{text}\n```" for name, text in helps)


def _helps(command: Any, name: str = "corral") -> Iterator[tuple[str, str]]:
    """Yield the words after `corral` and the help of each command."""
    context = command.make_context(name, [], resilient_parsing=True)
    context.terminal_width = 100
    inner = getattr(command, "commands", {})
    if not inner or command.invoke_without_command:
        yield name.partition(" ")[2], command.get_help(context)
    for word, subcommand in inner.items():
        yield from _helps(subcommand, f"{name} {word}")


def causes() -> str:
    """All causes of a failed start that are recognised."""
    tables: tuple[Table, ...] = ("specific", "failure", "warning")
    rows = dict.fromkeys(_cause_row(cause) for table in tables for _, cause in patterns(table))
    return "\n".join(["| code | message | fix |\n| --- | --- | --- |", *rows])


def _cause_row(cause: FailureCause) -> str:
    said, to_do = (_cell(_GROUP.sub("…", text)) for text in (cause.sentence, cause.hint))
    return f"| `{cause.code}` | {said} | {to_do} |"


def endpoints() -> str:
    """All endpoints that an engine answers."""
    rows = (
        f"| `{method} {path}` | {kind.name.lower().replace('_', ' ')} |"
        for method, paths in ENDPOINTS.items()
        for path, kind in paths.items()
    )
    return "\n".join(["| endpoint | kind |\n| --- | --- |", *rows])


def events() -> str:
    """All events with their fields."""
    rows = (
        f"| {name} | {level} | {', '.join(fields)} |" for name, (level, fields) in EVENTS.items()
    )
    return "\n".join(["| event | level | fields |\n| --- | --- | --- |", *rows])


def states() -> str:
    """The state diagram of an instance, drawn from its tables."""
    rows = [
        _arrow(before, after, str(event) + (" †" if _is_failure(before, event) else ""))
        for before, row in TRANSITIONS.items()
        for event, after in row.items()
    ]
    exits = [_arrow(state, "exited", "exited") for state in State if state not in WITHOUT_PROCESS]
    ends = [_arrow("exited", after, str(ending)) for ending, after in AFTER_EXIT.items()]
    choice = "    state exited <<choice>>"
    return "\n".join(["```mermaid", "stateDiagram-v2", *rows, *exits, choice, *ends, "```"])


def _is_failure(state: State, event: Event) -> bool:
    reason = STOP_REASONS.get((state, event))
    return reason is not None and reason not in NOT_FAILURES


def _arrow(before: str, after: str, label: str) -> str:
    return f"    {before} --> {after}: {label}"


def operations() -> str:
    """The operations of the control socket."""
    rows = "\n".join(map(_operation_row, OPERATIONS.values()))
    return f"| operation | body | answer |\n| --- | --- | --- |\n{rows}"


def _operation_row(operation: Operation) -> str:
    path = _PATTERN.sub(r"{\1}", operation.path)
    names = [*inspect.signature(operation.stub).parameters][1:]
    body = ", ".join(f"`{name}`" for name in names if f"{{{name}}}" not in path)
    annotation = inspect.signature(operation.stub).return_annotation.replace("messages.", "")
    kind = re.sub(r"^Stream\[(.*)\]$", r"\1", annotation)
    first_line = (operation.stub.__doc__ or "").partition("\n")[0]
    member = f"`{operation.member}`: " if operation.member else ""
    before = f"{operation.sends}, " if operation.sends in {"events", "progress", "waiting"} else ""
    return f"| `{operation.method} {path}` {first_line} | {body} | {before}{member}`{kind}` |"


PARTS: Final[Mapping[str, Callable[[], str]]] = {
    "settings": settings,
    "commands": commands,
    "causes": causes,
    "endpoints": endpoints,
    "events": events,
    "states": states,
    "operations": operations,
}

if __name__ == "__main__":
    main()
