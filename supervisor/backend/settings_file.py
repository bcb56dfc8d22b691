"""Checks settings, and lets the dashboard edit their file: its text, so that comments stay.

The page sees and names no path: the file is the one that the daemon has read.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attrs import define, field

from proxy.errors import BadRequest, Conflict, NotFound, Unavailable
from supervisor.backend.ollama import proxy_error
from supervisor.backend.proxy_settings import check_proxy_settings, read_nodes
from supervisor.errors import CorralError, SettingsInvalid, access_denied, error_of
from supervisor.fleet.planner import LaunchPlanner
from supervisor.fleet.reload import Reload
from supervisor.plan.context import embedding
from supervisor.plan.plan import Plan
from supervisor.settings.load import Loaded
from supervisor.settings.messages import READ_AGAIN
from supervisor.settings.schema import Settings
from supervisor.system.files import rewrite
from supervisor.system.toml_file import FILE_MAX_BYTES, read_limited

if TYPE_CHECKING:
    from cryptography.x509 import Certificate


@dataclass(frozen=True, slots=True)
class SettingsCheck:
    """What valid settings still leave to say, as sentences; `errors` are of models' plans."""

    errors: tuple[CorralError, ...]
    omitted: tuple[str, ...]  # flags
    certificates: tuple[str, ...]


def check_settings(settings: Settings, planner: LaunchPlanner) -> SettingsCheck:
    """Check settings as a start of the daemon does, and plan all models; raises SettingsInvalid."""
    check_proxy_settings(settings.proxy)
    read_nodes(settings.nodes, _emit_nothing)
    certificates = tuple(certificate_notes(settings, datetime.now(UTC)))
    plans: list[Plan] = []
    errors: list[CorralError] = []
    planner = planner.reading_once()
    for name in planner.entries:
        try:
            plans.append(planner.plan(name))
            if trial := planner.trial(name):
                plans.append(planner.plan_trial(name, trial))
        except CorralError as error:
            errors.append(error_of(name, error))
    if not errors:
        _check_fallbacks(settings, plans)
    omitted = (
        f"{plan.model}: {line.flag} is omitted: {line.reason}"
        for plan in plans
        for line in plan.omitted
    )
    return SettingsCheck(tuple(errors), tuple(omitted), certificates)


def _emit_nothing(_: str, /, **_fields: object) -> None:
    """A check starts no daemon, so its events have no reader."""


def _check_fallbacks(settings: Settings, plans: Iterable[Plan]) -> None:
    """Raise SettingsInvalid if a fallback generates no text."""
    mute = [
        plan.model
        for plan in plans
        if (found := embedding(plan.gguf, plan.memory_inputs.chosen)) is not None and found.is_only
    ]
    names = {name for model in mute for name in (model, *settings.models[model].aliases)}
    lists = {
        f"proxy.fallback.{name}": set(others) for name, others in settings.proxy.fallback.items()
    }
    for name, model in settings.models.items():
        if model.fallback:
            lists[f"models.{name}.fallback"] = {name, *model.fallback}
    for place, others in lists.items():
        for wrong in names & others:
            raise SettingsInvalid(
                f"{place}: {wrong} makes embeddings or ranks texts, no chats",
                hint="only chats fall back: vectors and ranks of two models do not compare",
            )


def certificate_notes(settings: Settings, now: datetime) -> Iterator[str]:
    """Yield a sentence for each certificate that has expired or is not valid yet."""
    from cryptography import x509  # noqa: PLC0415 (it takes memory, and most settings name no file)

    for setting, path in _certificate_files(settings):
        try:
            certificates = x509.load_pem_x509_certificates(path.read_bytes())
        except (OSError, ValueError):  # OpenSSL accepts more formats, and has accepted this file
            continue
        for found in certificates:
            if (problem := _certificate_problem(found, now)) is not None:
                name = found.subject.rfc4514_string() or f"number {found.serial_number:x}"
                yield f"{setting}: {path}: the certificate {name} {problem}"


def _certificate_files(settings: Settings) -> Iterator[tuple[str, Path]]:
    if tls := settings.proxy.tls:
        yield "proxy.tls.cert", tls.cert
        if tls.client_ca:
            yield "proxy.tls.client_ca", tls.client_ca
    for name, node in settings.nodes.items():
        if node.ca_file:
            yield f"nodes.{name}.ca_file", node.ca_file
        if node.cert:
            yield f"nodes.{name}.cert", node.cert


def _certificate_problem(found: Certificate, now: datetime) -> str | None:
    if found.not_valid_after_utc < now:
        return f"expired at {found.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; renew it"
    if found.not_valid_before_utc > now:
        return f"is not valid before {found.not_valid_before_utc:%Y-%m-%d %H:%M} UTC"
    return None


# A check waits for a reload that runs, which may load models.
_TIMEOUT_S: Final = 30.0


@define(eq=False, slots=False)
class SettingsFileAdapter:
    """Implements `SettingsFile`.

    `make_planner`: makes the planner of settings as they run.
    """

    _reload: Reload
    _make_planner: Callable[[Loaded], LaunchPlanner]
    _saving: asyncio.Lock = field(factory=asyncio.Lock, init=False)

    async def read(self) -> Mapping[str, object]:
        path = self._path()
        try:
            content = await asyncio.to_thread(read_limited, path)
            text = content.decode()
        except SettingsInvalid as error:
            raise proxy_error(error) from error
        except UnicodeDecodeError as error:
            raise Conflict(f"{path} is not text in UTF-8: {error}") from error
        return {"path": str(path), "text": text, "etag": _etag(content)}

    async def check(self, text: str) -> Mapping[str, object]:
        path, content = self._path(), text.encode()
        if len(content) > FILE_MAX_BYTES:
            raise BadRequest(f"the file would be larger than {FILE_MAX_BYTES >> 20} MiB")
        notes: list[str] = []

        def check(loaded: Loaded) -> Callable[[], None]:
            found = check_settings(loaded.settings, self._make_planner(loaded))
            notes.extend(f"{error.message}; {error.hint}" for error in found.errors)
            notes.extend((*found.omitted, *found.certificates))
            return lambda: None

        try:
            async with asyncio.timeout(_TIMEOUT_S):
                result = await self._reload.preview(content, check)
        except TimeoutError:
            raise Unavailable("a reload is running; retry when it is over", 5) from None
        if isinstance(result, CorralError):
            return {"problems": problems(result, path)}
        return {"problems": [], **result.difference.names(), "notes": [*result.notes, *notes]}

    async def save(self, text: str, etag: str) -> Mapping[str, object]:
        path = self._path()
        async with self._saving:
            found = await self.check(text)
            if found["problems"]:
                return found
            try:
                new = await asyncio.to_thread(_replace, path, text, etag)
            except CorralError as error:
                raise proxy_error(error) from error
        self._reload.schedule()
        return {**found, "etag": new}

    def _path(self) -> Path:
        """Return the path of the settings file; raises NotFound."""
        if path := self._reload.loaded.path:
            return path
        raise NotFound("the daemon runs without a settings file; corral init writes one")


def _etag(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _replace(path: Path, text: str, etag: str) -> str:
    """Write the file if it has not changed; return its new etag. Raises Conflict, CorralError."""
    if _etag(read_limited(path)) != etag:
        raise Conflict(f"{path} was changed meanwhile; load it again, and repeat the edit")
    with access_denied(f"{path} cannot be changed", "make it writable for the daemon's user"):
        rewrite(path, text)
    return _etag(read_limited(path))


_LINE: Final = re.compile(r"\(?at line (\d+)")  # of tomllib's messages


def problems(error: CorralError, path: Path) -> list[dict[str, object]]:
    """Return the lines of an error as `line` (None if unknown) and `message`, without the path."""
    place = re.compile(rf"{re.escape(str(path))}(?::(\d+))?(?:: | is | )")
    found: list[dict[str, object]] = []
    for text in error.message.splitlines():
        begins = place.match(text)
        line = (begins and begins[1]) or ((inner := _LINE.search(text)) and inner[1])
        message = text[begins.end() :] if begins else text
        found.append({"line": int(line) if line else None, "message": message})
    if error.hint and error.hint != READ_AGAIN:
        found[-1]["message"] = f"{found[-1]['message']}; {error.hint}"
    return found
