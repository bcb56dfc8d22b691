"""Implements `corral doctor` (problems of this installation) and `corral report` (bug reports)."""

from __future__ import annotations

import getpass
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

from proxy.observe.past import HistoryQuery
from supervisor.cli.engine import list_engines
from supervisor.cli.plan import plan
from supervisor.cli.requests import list_past
from supervisor.daemon.control_client import Client
from supervisor.diagnose import report as archive
from supervisor.diagnose.doctor import run_checks
from supervisor.diagnose.host_checks import Finding, secrets_of
from supervisor.errors import CorralError
from supervisor.output import (
    CommandResult,
    colored,
    hanging,
    size,
    table,
    terminal_columns,
    to_json,
)
from supervisor.settings.load import Loaded, flatten, load
from supervisor.system.files import check_new
from supervisor.system.paths import Directories, directories

_STYLES: Final = {"ok": "green", "warn": "yellow", "fail": "red"}


def doctor(config: Path | None) -> CommandResult:
    """Run all checks; exit code 1 if something will not work."""
    found = run_checks(config, directories())
    counts = {level: sum(finding.level == level for finding in found) for level in _STYLES}
    data = {"findings": [asdict(finding) for finding in found], **counts}
    return CommandResult(
        data, render(found, terminal_columns()), exit_code=1 if counts["fail"] else 0
    )


def render(found: Sequence[Finding], columns: int | None = None) -> str:
    width = max(len(finding.name) for finding in found)
    if columns:  # a long name has its text below it
        width = min(width, columns // 3)
    lines = []
    for finding in found:
        begin = f"{finding.level:4}  {finding.name:{width}} "
        text = f"{finding.text}\nfix: {finding.fix}" if finding.fix else finding.text
        if columns is None:
            text = text.replace("\n", "\n" + " " * len(begin))
        level = colored(finding.level, _STYLES[finding.level])
        lines.append(level + hanging(begin, text, columns).removeprefix(finding.level))
    return "\n".join([*lines, "", _verdict(found)])


def _verdict(found: Sequence[Finding]) -> str:
    failures = [finding.name for finding in found if finding.level == "fail"]
    if failures:
        return f"will not work: {', '.join(failures)}"
    warnings = sum(finding.level == "warn" for finding in found)
    return f"works; {warnings} could be better" if warnings else "all is well"


_MODELS_MAX: Final = 32
_REQUESTS_MAX: Final = 500
_UNSAFE: Final = re.compile(r"[^\w.-]")
_SENTENCES: Final = frozenset({"hint", "message", "not_persisted_reason", "reason"})
_PERSONAL: Final = frozenset({"client"})
# Errors quote rejected values; such a value may be a key at the wrong place.
_REFUSED: Final = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"")
_SECRET_VARIABLE: Final = re.compile(r"(?:KEY|TOKEN|SECRET|PASSWORD)$")


def report(config: Path | None, output: Path | None, *, with_prompts: bool) -> CommandResult:
    """Write the archive; works without a daemon and with invalid settings."""
    where = directories()
    folder = f"corral-report-{datetime.now().astimezone():%Y%m%d-%H%M%S}"
    path = (output or Path(f"{folder}.tar.gz")).absolute()
    check_new(path)
    loaded: Loaded | CorralError
    try:
        loaded = load(config)
    except CorralError as error:
        loaded = error
    logs, is_verbose = archive.read_logs(where, with_prompts=with_prompts)
    found = [
        *_parts(config, loaded, with_prompts=with_prompts),
        *_daemon_parts(where, has_quotes=is_verbose and not with_prompts),
        _part("past_requests.jsonl", _past_requests),
        *logs,
    ]
    clean = _anonymizer(loaded)
    parts = [archive.Part(part.name, clean(part.text), part.note) for part in found]
    notes = [f"{part.name}: {part.note}" for part in parts if part.note]
    parts.insert(0, archive.Part("README.txt", _readme(parts, notes, with_prompts=with_prompts)))
    size_bytes = archive.write_archive(path, folder, parts)
    sizes = {part.name: len(part.text.encode(errors="replace")) for part in parts}
    data = {"path": str(path), "size_bytes": size_bytes, "files": sizes, "left_out": notes}
    rows = [(name, size(count)) for name, count in sizes.items()]
    text = f"{table(('FILE', 'SIZE'), rows)}\n\n{path} ({size(size_bytes)})"
    return CommandResult(data, text, (*notes, _content(with_prompts=with_prompts)))


def _parts(
    config: Path | None, loaded: Loaded | CorralError, *, with_prompts: bool
) -> Iterator[archive.Part]:
    def settings() -> str:
        if isinstance(loaded, CorralError):
            raise loaded
        values = flatten(loaded.settings.model_dump(mode="json"))
        lines = archive.without_secrets(values, loaded.origins, with_prompts=with_prompts)
        return "\n".join([str(loaded.path or "no settings file"), *lines])

    yield archive.Part("versions.json", to_json(archive.versions(), indent=True))
    yield archive.Part("machine.json", to_json(archive.machine_facts(directories()), indent=True))
    yield _part("engines.txt", lambda: _shown(list_engines(config)))
    yield _part("doctor.txt", lambda: _shown(doctor(config)))
    yield _part("settings.txt", settings)
    models = () if isinstance(loaded, CorralError) else loaded.settings.models
    for model in list(models)[:_MODELS_MAX]:
        name = f"plans/{_UNSAFE.sub('_', model)}.txt"
        yield _part(name, lambda model=model: _shown(plan(model, config)))  # type: ignore[misc]


def _part(name: str, make: Callable[[], str]) -> archive.Part:
    """Return a file of the report, with the error if its content cannot be made."""
    try:
        return archive.Part(name, make())
    except CorralError as error:
        return archive.Part(name, _error_text(error))


def _shown(result: CommandResult) -> str:
    return "\n".join([result.text, *result.notes])


def _past_requests() -> str:
    found = list_past(HistoryQuery(limit=_REQUESTS_MAX)).data
    lines = [
        to_json(archive.clean_event({"event": "request.finished", **row}, has_quotes=True))
        for row in (found if isinstance(found, list) else [])
    ]
    return "\n".join([*lines, ""])


def _daemon_parts(where: Directories, *, has_quotes: bool) -> Iterator[archive.Part]:
    client = Client(where.control_socket)
    try:
        status, requests = client.status(), client.requests()
    except CorralError as error:
        yield archive.Part("status.txt", _error_text(error))
        return
    files = (("status.json", asdict(status)), ("requests.json", [*map(asdict, requests)]))
    for name, found in files:
        yield archive.Part(name, to_json(_without_texts(found, has_quotes=has_quotes), indent=True))


def _without_texts(value: Any, *, has_quotes: bool) -> Any:
    """Return a status without clients, and without quotes of engines in its sentences."""
    if isinstance(value, Mapping):
        return {
            key: (archive.LEFT_OUT if has_quotes else archive.cut_quote(inner))
            if key in _SENTENCES and isinstance(inner, str)
            else _without_texts(inner, has_quotes=has_quotes)
            for key, inner in value.items()
            if key not in _PERSONAL
        }
    if isinstance(value, list):
        return [_without_texts(inner, has_quotes=has_quotes) for inner in value]
    return value


def _anonymizer(loaded: Loaded | CorralError) -> Callable[[str], str]:
    user = ""
    with suppress(OSError, KeyError):  # a user without a name
        user = getpass.getuser()
    if isinstance(loaded, CorralError):
        secrets = [value[1:-1] for value in _REFUSED.findall(_error_text(loaded))]
    else:
        secrets = [*secrets_of(loaded.settings)]
    secrets += [value for name, value in os.environ.items() if _SECRET_VARIABLE.search(name)]
    home = os.path.expanduser("~")  # noqa: PTH111 (a text, and no error without a home)
    host = socket.gethostname()
    return partial(archive.anonymize, home=home, user=user, host=host, secrets=secrets)


def _error_text(error: CorralError) -> str:
    return "\n".join(filter(None, [error.message, error.hint]))


def _content(*, with_prompts: bool) -> str:
    if with_prompts:
        return "it may contain prompts and answers; keys are removed"
    return "it contains no prompts, no answers and no keys; check it before you publish it"


def _readme(parts: Sequence[archive.Part], notes: Sequence[str], *, with_prompts: bool) -> str:
    lines = [
        "A report of `corral report`.",
        f"As far as known, {_content(with_prompts=with_prompts)}.",
    ]
    lines += ["", "Files:", *(f"  {part.name}" for part in parts)]
    lines += ["", "Left out:", *(f"  {note}" for note in notes)] if notes else []
    return "\n".join([*lines, ""])
