"""Estimates when the first token of a request comes, and measures the errors of estimates.

An estimate changes nothing. It is made for clients that ask for it, for requests with a limit
(`Prefer: wait=5`), and for a sample of other requests, to compare it with the real first token. The
estimate of a sampled request that finds a free slot is made after its answer.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

from prometheus_client import Metric
from prometheus_client.core import HistogramMetricFamily

from proxy.common.background_tasks import FAILURES
from proxy.errors import WaitTooLong
from proxy.observe.metrics import Histogram
from proxy.observe.record import AccessRecord
from proxy.request.request import ProxyRequest
from proxy.router.forecast import EngineWork, LoadForecast, LoadForecaster, first_token
from proxy.router.lease import Clock
from proxy.router.measures import PromptLength
from proxy.router.router import Router
from proxy.router.workload import EarlierWork, EstimatedWork

BOUNDS: Final = (0.05, 0.1, 0.15, 0.25, 0.4, 0.6, 1.0, 2.0, 5.0)
_MODELS_MAX: Final = 64
# The shortest time of a first token.
_REAL_MIN_S: Final = 0.001


# Sample at most 4 requests/s, and spend at most 0.1 % of the time on estimates.
_PAUSE_MIN_S: Final = 0.25
_PAUSE_SHARE: Final = 1000.0
_RETRY_MAX_S: Final = 120


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate for one request; unknown figures are None."""

    model: str
    prompt_tokens: int
    new_tokens: int  # Prompt tokens that the instance has to compute.
    instance: str | None
    is_loaded: bool = True
    # The prompt's length and its expected part in the instance's cache; None without a prompt.
    length: PromptLength | None = None
    load: LoadForecast | None = None  # The load before the request, if no instance serves the model
    queue_s: float | None = None  # The wait for a slot behind other requests, without a load.
    first_token_s: float | None = None  # Time of the first token, with the queue and the load.
    factor: float = 1.0  # The factor of the correction, beside `others` other requests.
    others: int = 0


class Estimator:
    """Estimates first tokens; `loader` is None if requests never load models."""

    def __init__(
        self, router: Router, loader: LoadForecaster | None = None, clock: Clock = time.monotonic
    ) -> None:
        self._router = router
        self._loader = loader
        self._clock = clock
        self._errors: dict[str, Histogram] = {}  # relative errors by model, of the first 64
        self._due_at_s = 0.0

    def estimate(self, request: ProxyRequest, *, is_own: bool = False) -> Estimate:
        """Estimate a request as if it came now.

        With `is_own`, only cache content of the same key counts.
        """
        if is_own:
            request = self._router.as_client_knows(request)
        load = None
        if self._loader and not self._router.serves(request.model):
            load = self._loader.load_forecast(request.model)
        reader = self._router.queues[request.model].reader
        return self._estimate(request, load, reader.work(request, _engines(request.model, load)))

    def _estimate(
        self, request: ProxyRequest, load: LoadForecast | None, estimated_work: EstimatedWork
    ) -> Estimate:
        work, lengths = estimated_work
        measures = self._router.queues[request.model].measures
        costs, factor = measures.costs(), measures.correction.factor(work.others)
        instance = work.engines[0].name if len(work.engines) == 1 else None
        queue_s = first_s = None
        if costs and not (load and (load.in_s is None or load.refusal)):
            load_s = (load and load.in_s) or 0.0  # the correction is not for the load
            if found := first_token(replace(work, ready_in_s=load_s), costs):
                instance, queued_s, first_token_s = found
                queue_s = max(0.0, factor * (queued_s - load_s))
                first_s = load_s + factor * (first_token_s - load_s)
        waiting = work.waiting[work.place]
        tokens = waiting.prompt_tokens
        new_tokens = waiting.new_on(instance) if instance else tokens
        length, is_loaded = lengths.get(instance or ""), self._router.serves(request.model)
        times = queue_s, first_s, factor, work.others
        return Estimate(
            request.model, tokens, new_tokens, instance, is_loaded, length, load, *times
        )

    @property
    def is_due(self) -> bool:
        """Whether the next request is one of the sample."""
        return self._clock() >= self._due_at_s

    @contextmanager
    def observe(self, request: ProxyRequest, record: AccessRecord) -> Iterator[None]:
        """Compare an estimate with the request in the block.

        A request that finds a free slot is estimated after its answer, from the work before it.

        Raises WaitTooLong: the estimate exceeds the client's limit.
        """
        now_s = self._clock()
        basis: Estimate | EarlierWork | None = None
        if request.prompt and request.kind.generates:
            if not request.wait_s:  # 0: the request takes a slot that is free now, or none
                basis = self._router.queues[request.model].reader.earlier_work(request)
            basis = basis or self._try_estimate(request)
        self._note_spent(now_s)
        if request.wait_s and isinstance(basis, Estimate):
            known = self._router.as_client_knows(request)
            own = basis if known is request else self._try_estimate(known)
            _check(request, own or basis, request.wait_s)
        try:
            yield
        finally:
            if basis:  # soon: the request ends first
                loop = asyncio.get_running_loop()
                loop.call_soon(self._compare, request, basis, record, now_s)

    def _note_spent(self, since_s: float) -> None:
        now_s = self._clock()
        pause_s = max(_PAUSE_MIN_S, _PAUSE_SHARE * (now_s - since_s))
        self._due_at_s = max(self._due_at_s, now_s + pause_s)

    def _try_estimate(
        self, request: ProxyRequest, estimated_work: EstimatedWork | None = None
    ) -> Estimate | None:
        """Estimate a request; errors are noted and do not affect the request."""
        try:
            if estimated_work:
                return self._estimate(request, None, estimated_work)
            return self.estimate(request)
        except (ArithmeticError, LookupError, ValueError) as error:
            FAILURES.note("estimate", error)
            return None

    def _compare(
        self,
        request: ProxyRequest,
        basis: Estimate | EarlierWork,
        record: AccessRecord,
        at_s: float,
    ) -> None:
        began_at_s = self._clock()
        if isinstance(basis, Estimate):
            self._note_errors(basis, record, at_s)
        elif record.instance:
            work = basis(record.instance, record.expected_cached)
            if found := self._try_estimate(request, work):
                self._note_errors(found, record, at_s)
            self._router.queues[request.model].reader.learn_all()
        self._note_spent(began_at_s)

    def _note_errors(self, found: Estimate, record: AccessRecord, at_s: float) -> None:
        measures, timeline = self._router.queues[found.model].measures, record.timeline
        if found.length and record.timings and record.instance == found.instance:
            measures.tokens.note(found.length, record.timings)
        if found.first_token_s is not None and timeline.first_token_ms is not None:
            real_s = timeline.began_at_s + timeline.first_token_ms / 1000 - at_s
            self._note_error(found.model, found.first_token_s, real_s)
            if found.load is None:
                uncorrected_s = found.first_token_s / found.factor
                measures.correction.note(found.others, uncorrected_s, real_s)

    def _note_error(self, model: str, estimated_s: float, real_s: float) -> None:
        if model in self._errors or len(self._errors) < _MODELS_MAX:
            real_s = max(real_s, _REAL_MIN_S)
            histogram = self._errors.setdefault(model, Histogram(BOUNDS))
            histogram.add(abs(estimated_s - real_s) / real_s)

    def collect(self) -> Iterator[Metric]:
        text = (
            "Difference of estimated and real time to the first token, as a share of the real; "
            "of four requests a second at most."
        )
        family = HistogramMetricFamily("corral_estimate_error_ratio", text, labels=("model",))
        edges = [*(str(bound) for bound in BOUNDS), "+Inf"]
        for model, histogram in self._errors.items():
            buckets = list(zip(edges, accumulate(histogram.counts), strict=True))
            family.add_metric((model,), buckets, histogram.total)
        yield family


def _engines(model: str, load: LoadForecast | None) -> list[EngineWork]:
    if load is None:
        return []
    slots = tuple(range(load.slots))
    return [
        EngineWork(f"{model}.{number}", load.batch_tokens, free_slots=slots)
        for number in range(load.instances)
    ]


def _check(request: ProxyRequest, found: Estimate, wait_s: float) -> None:
    """Raise WaitTooLong if the first token would come after the client's limit."""
    first_token_s = found.first_token_s or 0.0
    if first_token_s <= wait_s:
        return
    parts = f"{found.queue_s or 0.0:.1f} s in the queue"
    if found.load:
        parts = f"{found.load.in_s:.1f} s to load {request.model}, {parts}"
    raise WaitTooLong(
        f"the first token is expected in {first_token_s:.1f} s ({parts}), and the request waits "
        f"{wait_s:g} s (Prefer: wait); retry later, or send it without that preference",
        min(_RETRY_MAX_S, max(1, math.ceil(first_token_s - wait_s))),
    )
