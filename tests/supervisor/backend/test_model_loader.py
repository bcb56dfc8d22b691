"""Models for the proxy: waiting for one, and their names."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.corral_cli import PATIENCE_S

from proxy.errors import UnknownModel
from proxy.settings import ProxySettings
from supervisor.backend import models
from supervisor.backend.models import LocalModels
from supervisor.events import EventStream
from supervisor.settings.schema import Settings


class Model:
    """Loads for ever."""

    is_configured = True
    entry: object = None


class FakeAdmission:
    """A fleet of one model, and its admission controller."""

    planner = SimpleNamespace(settings=Settings())

    def __init__(self, model: Model) -> None:
        self.models = {"chat": model}

    @contextmanager
    def request_load(self, _: object) -> Iterator[None]:
        yield


async def test_a_wait_ends_when_its_model_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "availability", lambda _: ("loading", None))
    events, model = EventStream(), Model()
    proxy = cast("Any", FakeAdmission(model))
    found = LocalModels(proxy, proxy, events)
    monkeypatch.setattr(found, "models", list)
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        waiting = group.create_task(refusal(found))
        await asyncio.sleep(0)  # it waits now
        model.is_configured = False
        events.emit("settings.reloaded", added=[], removed=[], changed=[], kept=[], notes=[])
    assert waiting.result() == 404


async def refusal(found: LocalModels) -> int:
    with pytest.raises(UnknownModel) as refused:
        await found.ensure_ready("chat")
    return refused.value.status


@pytest.mark.parametrize(
    ("refusal", "is_open", "reason", "headers"),
    [
        (None, True, "its file is broken", {}),
        (None, False, "it is stopped (corral start chat)", {}),
        ("out of memory", True, "out of memory", {"Retry-After": "10"}),
        ("out of memory", True, "its file is broken", {}),
        ("out of memory", False, "out of memory", {}),
    ],
)
def test_a_model_that_only_a_command_starts_again_has_no_retry_after(
    refusal: str | None, *, is_open: bool, reason: str, headers: dict[str, str]
) -> None:
    entry = SimpleNamespace(name="chat", path=Path("/m/chat.gguf"))
    model = SimpleNamespace(entry=entry, refusal=refusal, is_open=is_open)
    assert models.failure(cast("Any", model), reason).headers() == headers


def test_names_are_built_again_only_when_settings_change(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    fleet = cast("Any", FakeAdmission(model))
    loader = LocalModels(fleet, fleet, EventStream())
    monkeypatch.setattr(loader, "models", list)
    first = loader.names()
    assert loader.names() is first
    model.entry = object()
    second = loader.names()
    assert second is not first
    fleet.planner = SimpleNamespace(
        settings=Settings.model_construct(proxy=ProxySettings(default_model="chat"))
    )
    third = loader.names()
    assert third is not second
    assert (second.default, third.default) == (None, "chat")
    assert third.prompt_rules is None
    rules = {"editor": ("move:date",)}
    fleet.planner = SimpleNamespace(
        settings=Settings.model_construct(proxy=ProxySettings(prompt_rules=rules))
    )
    before = loader.names().prompt_rules
    assert before
    assert before.rules == rules
    model.entry = object()
    assert loader.names().prompt_rules is before  # it keeps the frozen values
    model.is_configured = False
    assert loader.names() is not third
