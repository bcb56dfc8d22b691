"""Tells the proxy what a load would take (proxy.estimate.load_forecast.LoadForecaster)."""

from __future__ import annotations

from proxy.estimate.load_forecast import LoadForecast
from proxy.failures import FAILURES
from proxy.upstream.upstream import BATCH_TOKENS
from supervisor.admission.controller import AdmissionController
from supervisor.fleet.availability import availability
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.model import Model
from supervisor.proxy_adapter.redact import without_directories


class LoadForecasterAdapter:
    def __init__(self, fleet: Fleet, admission: AdmissionController) -> None:
        self._fleet = fleet
        self._admission = admission

    def load_forecast(self, model: str) -> LoadForecast | None:
        """Return what a request would cause; None where the model is not configured here."""
        found = self._fleet.models.get(model)
        if found is None or not found.is_configured:
            return None
        try:
            return self._forecast(found)
        except OSError as error:  # the memory of the machine cannot be read now
            FAILURES.note("load forecast", error)
            return LoadForecast(None)

    def _forecast(self, found: Model) -> LoadForecast:
        state, reason = availability(found)
        eviction = self._admission.forecast(found)
        load_s = self._admission.load_s(found)
        refusal = reason if state == "failed" else eviction.refusal
        plan = found.plan
        return LoadForecast(
            None if load_s is None else load_s + eviction.wait_s,
            eviction.models,
            instances=len(found.replicas),
            slots=plan.slots if plan else 1,
            batch_tokens=plan.batch_tokens if plan else BATCH_TOKENS,
            refusal=refusal and without_directories(refusal, [found.entry.path]),
        )
