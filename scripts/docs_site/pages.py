"""What the code says in the documentation: whole pages, and parts of pages; a hook of mkdocs.

Source: mkdocs, "Hooks" and "Files" (`File.generated`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer
from mkdocs.structure.files import File, Files

from proxy.endpoints import ENDPOINTS
from supervisor.cli.app import app
from supervisor.process.exit_patterns import (
    FAILURE_PATTERNS,
    SPECIFIC_PATTERNS,
    WARNING_PATTERNS,
    LogPattern,
)
from supervisor.settings.reference import SettingReference, settings_reference

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

ROOT: Final = Path(__file__).parents[2]
_GROUP: Final = re.compile(r"(?:\{\w+\})+")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the generated pages (mkdocs calls this by its name)."""
    for name, make in PAGES.items():
        files.append(File.generated(config, name, content=make()))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Put what the code says in place of its marks (mkdocs calls this by its name)."""
    for mark, make in PARTS.items():
        if mark in markdown:
            markdown = markdown.replace(mark, make())
    return markdown


def every_setting() -> str:
    """All settings of corral.toml."""
    tables: dict[tuple[str, ...], list[SettingReference]] = {}
    for one in settings_reference():
        tables.setdefault(one.key[:-1], []).append(one)
    parts = (_table_of_settings(*item) for item in tables.items())
    return "\n\n".join(parts)


def _table_of_settings(table: tuple[str, ...], settings: list[SettingReference]) -> str:
    title = f"`[{'.'.join(table)}]`" if table else "Outside of tables"
    head = "| key | value | default | meaning |\n| --- | --- | --- | --- |"
    return "\n".join([f"## {title}\n", head, *map(_setting_row, settings)])


def _setting_row(one: SettingReference) -> str:
    limits = f"; {one.limits}" if one.limits else ""
    default = "required" if one.is_required else _value(one.default)
    return (
        f"| `{one.key[-1]}` | {_cell(one.kind + limits)} | {default} | {_cell(one.description)} |"
    )


def _value(default: object) -> str:
    if default is None or default in ([], ""):
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def every_command() -> str:
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
    for word, one in inner.items():
        yield from _helps(one, f"{name} {word}")


def every_cause() -> str:
    """All causes of a failed start that are recognised."""
    patterns = (*SPECIFIC_PATTERNS, *FAILURE_PATTERNS, *WARNING_PATTERNS)
    rows = dict.fromkeys(map(_cause_row, patterns))
    return "\n".join(["| code | what is said | what to do |\n| --- | --- | --- |", *rows])


def _cause_row(one: LogPattern) -> str:
    said, to_do = (_cell(_GROUP.sub("…", text)) for text in (one.sentence, one.hint))
    return f"| `{one.code}` | {said} | {to_do} |"


def every_endpoint() -> str:
    """All endpoints that an engine answers."""
    rows = (
        f"| `{method} {path}` | {kind.name.lower().replace('_', ' ')} |"
        for method, paths in ENDPOINTS.items()
        for path, kind in paths.items()
    )
    return "\n".join(["| endpoint | kind |\n| --- | --- |", *rows])


def _design(package: str) -> str:
    """The design of a package; its links into the source tree become plain text."""
    text = (ROOT / package / "DESIGN.md").read_text("utf-8")
    return re.sub(r"\[([^\]]+)\]\((?!https?:)[^)]+\)", r"\1", text)


PARTS: Final[Mapping[str, Callable[[], str]]] = {
    "<!-- every setting -->": every_setting,
    "<!-- every command -->": every_command,
    "<!-- every cause -->": every_cause,
    "<!-- every endpoint -->": every_endpoint,
}
PAGES: Final[Mapping[str, Callable[[], str]]] = {
    "architecture-supervisor.md": lambda: _design("supervisor"),
    "architecture-proxy.md": lambda: _design("proxy"),
    "changelog.md": lambda: (ROOT / "CHANGELOG.md").read_text("utf-8"),
}
