"""The supervisor's reports of a load to the proxy."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proxy.common.background_tasks import FAILURES
from proxy.router.estimator import LoadForecast
from supervisor.backend import models
from supervisor.backend.models import LocalModels
from supervisor.events import EventStream


class Unreadable:
    """An admission controller on a machine without a free descriptor."""

    def forecast(self, _: object) -> None:
        raise OSError(24, "Too many open files")


def test_memory_that_cannot_be_read_is_reported_and_fails_no_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FAILURES, "counts", Counter())
    monkeypatch.setattr(models, "availability", lambda _: ("unloaded", None))
    fleet = SimpleNamespace(models={"chat": SimpleNamespace(is_configured=True)})
    found = LocalModels(cast("Any", fleet), cast("Any", Unreadable()), EventStream())
    assert found.load_forecast("chat") == LoadForecast(None)
    assert FAILURES.counts == {"load forecast": 1}
