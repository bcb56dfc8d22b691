"""Implements `corral connect`: settings of client programs for the running daemon.

Reads, backs up, writes and restores the settings files of clients. Before a write, the changes are
recorded in files under `connect/` of the data directory, so that `--undo` can remove them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Final

import httpx

from supervisor import errors
from supervisor.cli.batch import KEY_VARIABLE, connect, error_of, translate_http_errors
from supervisor.clients import journal, programs
from supervisor.daemon.control_client import Client
from supervisor.daemon.control_messages import DaemonStatus, ModelStatus
from supervisor.models.metadata import read
from supervisor.models.model_meta import makes_vectors
from supervisor.output import CommandResult, table
from supervisor.settings.import_flags import read_text
from supervisor.settings.load import load
from supervisor.settings.schema import Settings
from supervisor.system.files import back_up, rewrite, write_atomic
from supervisor.system.paths import directories, make_private

# The model may have to be loaded first, and its prompt computed.
_CHECK_TIMEOUT_S: Final = 600.0
_STATE: Final = "corral status shows its state"


def daemon_facts(model: str | None, small: str | None) -> programs.Facts:
    """Read the facts that clients' settings need; raises NotRunning.

    Raises NoSuchModel if the daemon has no such model with chats, or AccessDenied if it needs a key
    and CORRAL_API_KEY has none.
    """
    try:
        status = Client(directories().control_socket).status()
    except errors.NotRunning as error:
        raise errors.NotRunning(error.message, hint="corral start starts it") from error
    with connect() as http:
        listed, needs_key = _list_models(http)
    config = Path(status.config) if status.config else None
    settings = load(config).settings
    models = _chat_models(listed, status, settings)
    loaded = [found.name for found in status.models if found.state == "loaded"]
    default = settings.proxy.default_model
    chosen = _choose_model(model, models, [*([default] if default else []), *loaded])
    return programs.Facts(
        url=status.url,
        models=models,
        model=chosen,
        small=_choose_model(small, models, [chosen.name]),
        ruled=frozenset(settings.proxy.prompt_rules),
        needs_key=needs_key,
        certificate=programs.self_signed(status.tls_cert),
    )


def check(facts: programs.Facts, api: programs.Api) -> None:
    """Send one request as a client does; raises CorralError if it fails or its answer is cut."""
    body = programs.body(api, facts.model.name)
    with connect() as http, translate_http_errors(_STATE):
        answer = http.post(api, json=body, headers=programs.headers(api), timeout=_CHECK_TIMEOUT_S)
    if answer.is_error:
        raise _refusal_error(answer)
    if not programs.is_complete(api, answer.text):
        raise errors.CorralError(
            f"{facts.model.name} broke off its answer at {api}",
            hint=f"corral logs {facts.model.name} shows why",
        )


def _list_models(http: httpx.Client) -> tuple[list[Mapping[str, Any]], bool]:
    """Return the models that the API key may use, and whether a key is needed."""
    with translate_http_errors(_STATE):
        answer = http.get("/v1/models", headers={"Authorization": ""})
        needs_key = answer.status_code == httpx.codes.UNAUTHORIZED
        if needs_key and os.environ.get(KEY_VARIABLE):
            answer = http.get("/v1/models")
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        raise errors.AccessDenied(
            f"the daemon needs an API key, and {KEY_VARIABLE} has no valid one",
            hint=f"corral key add NAME makes one; then export {KEY_VARIABLE}=…",
        )
    if answer.is_error:
        raise _refusal_error(answer)
    return answer.json()["data"], needs_key


def _chat_models(
    listed: Iterable[Mapping[str, Any]], status: DaemonStatus, settings: Settings
) -> tuple[programs.ServedModel, ...]:
    local = {model.name: model for model in status.models}
    return tuple(
        programs.ServedModel(
            model["id"],
            model["context_length"],
            sees_images="image" in model["architecture"]["input_modalities"],
        )
        for model in listed
        if not model["variant_of"] and _chats(local.get(model["id"]), settings)
    )


def _chats(model: ModelStatus | None, settings: Settings) -> bool:
    """Return whether a model answers chats, as far as this machine knows."""
    if model is None:
        return True
    own = settings.models.get(model.name)
    try:
        gguf = read(Path(model.path), cache_dir=directories().cache)
    except errors.CorralError:
        return True
    return not makes_vectors(gguf, own.flags if own else {})


def _choose_model(
    name: str | None, models: Sequence[programs.ServedModel], preferred: Sequence[str]
) -> programs.ServedModel:
    by_name = {model.name: model for model in models}
    known = ", ".join(by_name) or "none"
    if name is None and models:
        return next((by_name[name] for name in preferred if name in by_name), models[0])
    if name not in by_name or name is None:
        what = f"no model named {name!r} answers chats" if name else "no model answers chats"
        raise errors.NoSuchModel(what, hint=f"models with chats: {known}")
    return by_name[name]


def _refusal_error(answer: httpx.Response) -> errors.CorralError:
    text = f"the daemon refused {answer.request.url.path}: {error_of(answer)[0]}"
    return errors.CorralError(text, hint="corral status shows its models")


_WRITABLE: Final = "make it yours and writable, then try again"


class SettingsFiles:
    """Clients' settings files and records of our changes; after an error no file is changed."""

    def __init__(self, data: Path) -> None:
        self._journals = data / "connect"

    def is_connected(self, client: str) -> bool:
        return self._journal(client).exists()

    def write(
        self, client: str, wanted: Sequence[programs.FileSettings]
    ) -> list[tuple[Path, Path | None]]:
        """Write settings; return each path, and its backup if the file existed before."""
        wanted = [replace(file, path=Path(os.path.realpath(file.path))) for file in wanted]
        earlier = {file_entries.path: file_entries for file_entries in self._read(client)}
        made = []
        for file in wanted:
            text, before = _text(file.path), earlier.pop(file.path, None)
            with _report_format_errors(file.path):
                made.append(
                    journal.apply_file_settings(text or "", file, before, is_new=text is None)
                )
        with errors.access_denied(f"cannot change {self._journals}", _WRITABLE):
            make_private(self._journals.parent)
            make_private(self._journals)
            entries = [*(file_entries for _, file_entries in made), *earlier.values()]
            write_atomic(self._journal(client), journal.JOURNAL.dump_json(entries))
        return [_write_text(entries.path, text) for text, entries in made]

    def undo(self, client: str) -> list[tuple[Path, tuple[programs.Place, ...], bool]]:
        """Remove the settings that were written; raises CorralError if there are none.

        Returns:
            Each file, its values that were changed since and stay, and whether it was removed.
        """
        written = self._read(client)
        if not written:
            raise errors.CorralError(
                f"corral connect {client} --write has written nothing that could be removed",
                hint="corral connect shows which clients are connected",
            )
        found = []
        for file in written:
            if text := _text(file.path):
                with _report_format_errors(file.path):
                    found.append((file, journal.undo_entries(text, file)))
        restored = []
        for file, (text, left) in found:
            is_removed = file.is_new and journal.is_empty(text)
            with errors.access_denied(f"cannot change {file.path}", _WRITABLE):
                if is_removed:
                    file.path.unlink(missing_ok=True)
                else:
                    rewrite(file.path, text)
            restored.append((file.path, left, is_removed))
        with errors.access_denied(f"cannot change {self._journals}", _WRITABLE):
            self._journal(client).unlink()
        return restored

    def _journal(self, client: str) -> Path:
        return self._journals / f"{client}.json"

    def _read(self, client: str) -> list[journal.FileEntries]:
        path = self._journal(client)
        if (text := _text(path)) is None:
            return []
        try:
            return journal.JOURNAL.validate_json(text)
        except ValueError as error:
            raise errors.SettingsInvalid(
                f"{path} cannot be read: {error}",
                hint="restore the client's settings from their backup, then delete it",
            ) from error


@contextmanager
def _report_format_errors(path: Path) -> Iterator[None]:
    """Raise SettingsInvalid if the block finds another format than expected."""
    try:
        yield
    except (ValueError, TypeError, LookupError) as error:
        raise errors.SettingsInvalid(
            f"{path} cannot be changed safely: {error}", hint="correct it, then try again"
        ) from error


def _text(path: Path) -> str | None:
    """Return the text of a file, None if there is none; raises SettingsInvalid."""
    return read_text(path) if os.path.lexists(path) else None


def _write_text(path: Path, text: str) -> tuple[Path, Path | None]:
    with errors.access_denied(f"cannot change {path}", _WRITABLE):
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_atomic(path, text)
            return path, None
        backup = back_up(path)
        rewrite(path, text)
        return path, backup


def names() -> Iterator[str]:
    return (client.name for client in programs.CLIENTS)


def list_clients() -> CommandResult:
    """List the clients, those found on this machine first."""
    places, files = _places(), SettingsFiles(directories().data)
    rows = [_row(client, places, files) for client in programs.CLIENTS]
    rows.sort(key=lambda row: (not row["connected"], not row["found"]))
    words = {True: "yes", False: None}
    cells = [[words.get(value, value) for value in row.values()] for row in rows]
    text = table(("CLIENT", "PROGRAM", "FOUND", "CONNECTED"), cells)
    return CommandResult(rows, text, ("corral connect CLIENT shows its settings",))


def show(name: str, model: str | None, small: str | None) -> CommandResult:
    client = _client(name)
    facts = daemon_facts(model, small)
    texts = {str(file.path): journal.text_of(file) for file in client.files(facts, _places())}
    text = "\n\n".join(f"# {path}\n{content}".rstrip() for path, content in texts.items())
    files = [{"path": path, "content": content} for path, content in texts.items()]
    data = {"client": name, "files": files}
    offers = journal.notes_of(client, facts), journal.rule_notes(client, facts)
    notes = (*chain(*offers), f"corral connect {name} --write writes them")
    return CommandResult(data, text, notes)


def write(name: str, model: str | None, small: str | None, *, checks: bool) -> CommandResult:
    """Send a request as the client does, then write its settings; an error writes nothing."""
    client = _client(name)
    facts = daemon_facts(model, small)
    if checks:
        check(facts, client.api)
        facts = daemon_facts(model, small)  # the model is loaded now, so its context is known
    written = SettingsFiles(directories().data).write(name, client.files(facts, _places()))
    lines = [f"wrote {path}" for path, _ in written]
    lines += [f"{facts.model.name} answers at {facts.url}{client.api}"] if checks else []
    backups = [backup for _, backup in written if backup]
    data = {
        "client": name,
        "model": facts.model.name,
        "small": facts.small.name,
        "files": [str(path) for path, _ in written],
        "backups": list(map(str, backups)),
        "is_checked": checks,
    }
    notes = (
        *(f"{backup} has the previous content" for backup in backups),
        *journal.notes_of(client, facts),
        *journal.rule_notes(client, facts),
        f"start it: {client.run(facts)}",
    )
    return CommandResult(data, "\n".join(lines), notes)


def undo(name: str) -> CommandResult:
    """Remove the settings that `write` wrote, except values that were changed since."""
    client = _client(name)
    undone = SettingsFiles(directories().data).undo(client.name)
    lines = [f"{'removed' if is_removed else 'restored'} {path}" for path, _, is_removed in undone]
    left = [(path, ".".join(map(str, place))) for path, places, _ in undone for place in places]
    notes = tuple(f"{path}: {place} was changed since, and stays" for path, place in left)
    data = {
        "client": name,
        "files": [str(path) for path, _, _ in undone],
        "left": [[str(path), place] for path, place in left],
    }
    return CommandResult(data, "\n".join(lines) or "none of its files exists any more", notes)


def _client(name: str) -> programs.ClientProgram:
    by_name = {client.name: client for client in programs.CLIENTS}
    if name not in by_name:
        raise errors.CorralError(
            f"no client is named {name!r}", hint=f"clients: {', '.join(by_name)}"
        )
    return by_name[name]


def _places() -> programs.Places:
    return programs.Places(Path.home(), dict(os.environ), directories().config)


def _row(
    client: programs.ClientProgram, places: programs.Places, files: SettingsFiles
) -> dict[str, Any]:
    is_installed = any(shutil.which(program) for program in client.programs or (client.name,))
    directory = client.settings_directory(places)
    is_own = directory not in {places.home, places.corral}
    return {
        "name": client.name,
        "title": client.title,
        "found": is_installed or (is_own and directory.is_dir()),
        "connected": files.is_connected(client.name),
    }
