"""Estimates when the first token of a request comes, and measures the errors of estimates.

An estimate uses the figures by which the router chooses an instance: how long requests hold a slot,
the prompt tokens that an instance still has to compute, its speed, and the tokens that its cache is
expected to hold. It changes nothing. It is made for clients that ask for it, for requests with a
limit (`Prefer: wait=5`), and for a sample of other requests, to compare it with the real first
token.

Only the length of a prompt in bytes is known; tokenizer and template decide its number of tokens.
The tokens to compute are learned separately from the whole: the difference of two large estimates
would be mostly error. `Correction` compares recent estimates with real times, by the number of
other requests.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from statistics import median
from typing import Final, Protocol

from prometheus_client import Metric

from proxy.common.background_tasks import FAILURES
from proxy.common.least_squares import LeastSquares
from proxy.errors import WaitTooLong
from proxy.observe.metrics import Histogram, histogram
from proxy.observe.record import AccessRecord
from proxy.request.request import ProxyRequest
from proxy.router.lease import Clock, RoutingTarget
from proxy.router.model_queue import ModelQueue
from proxy.router.queue import QueuedRequest, queue_entry
from proxy.router.registry import InstanceSets
from proxy.router.router import Router
from proxy.upstream.upstream import Rates, Timings

# Of the numbers of cached tokens of a prompt, so many are looked at.
_LEVELS_MAX: Final = 4
_LATEST_MAX: Final = 32
_MIN: Final = 8
_LEVELS: Final = 5
# A correction goes half the way, by the square root of the ratio, within this factor. The speeds
# themselves follow a machine that became slower.
_FACTOR_MAX: Final = 1.4


class Correction:
    """The factor by which one model's estimates are corrected."""

    def __init__(self) -> None:
        self._ratios: defaultdict[int, deque[float]] = defaultdict(
            lambda: deque(maxlen=_LATEST_MAX)
        )

    def note(self, others: int, estimated_s: float, real_s: float) -> None:
        """Add the real time for an uncorrected estimate beside `others` other requests."""
        if estimated_s > 0:
            self._ratios[_level(others)].append(real_s / estimated_s)

    def factor(self, others: int) -> float:
        ratios = self._ratios.get(_level(others), ())
        if len(ratios) < _MIN:
            return 1.0
        return min(_FACTOR_MAX, max(1 / _FACTOR_MAX, math.sqrt(median(ratios))))


def _level(others: int) -> int:
    """Return the level of 0, 1, 2 to 3, 4 to 7, or more other requests."""
    return min(others.bit_length(), _LEVELS - 1)


# Scales of the regressors: a template counts as much as 32 tokens. Assumed: no template, and as
# many tokens as estimated.
_SCALES: Final = (1 / 32, 1.0)
_ASSUMED: Final = (0.0, 1.0)
_HITS_MAX: Final = 16
_EXPECTED_MIN_TOKENS: Final = 64
_HIT: Final = 0.5
_GROWN: Final = 0.1


@dataclass(frozen=True, slots=True)
class PromptLength:
    tokens: int  # Tokens, estimated from its bytes.
    cached: int = 0  # The part of them expected in a cache.

    @property
    def new(self) -> int:
        return self.tokens - self.cached


class PromptTokens:
    """Predicts the tokens of one model's prompts from their lengths."""

    def __init__(self) -> None:
        self._whole = LeastSquares(_SCALES, _ASSUMED)
        self._new = LeastSquares(_SCALES, _ASSUMED)
        self._hits: deque[bool] = deque(maxlen=_HITS_MAX)

    def note(self, length: PromptLength, timings: Timings) -> None:
        found, computed = timings.cached_tokens, timings.prompt_tokens
        whole = max(1, found + computed)
        self._whole.add((1.0, length.tokens), whole)
        expected = whole * length.cached / length.tokens
        is_hit = True
        if length.cached >= _EXPECTED_MIN_TOKENS:
            is_hit = found >= _HIT * expected
            self._hits.append(is_hit)
        # Content that others put into the cache says nothing about lengths.
        if is_hit and found <= expected + _EXPECTED_MIN_TOKENS + _GROWN * whole:
            self._new.add((1.0, length.new), max(1, computed))

    def whole(self, length: PromptLength) -> int:
        return max(1, round(self._whole.value((1.0, length.tokens))))

    def new(self, length: PromptLength) -> int:
        if self._hits and sum(self._hits) < _HIT * len(self._hits):
            length = PromptLength(length.tokens)
        return max(1, min(self.whole(length), round(self._new.value((1.0, length.new)))))


@dataclass(frozen=True, slots=True)
class LoadForecast:
    """The load of a model that no instance serves."""

    # Seconds until it serves; None if it was never loaded, or the time is unknown now.
    in_s: float | None
    evicts: tuple[str, ...] = ()  # The models that would be unloaded for it.
    instances: int = 1  # The number of instances that would start.
    slots: int = 1  # The slots of each instance.
    refusal: str | None = None  # Why it would not be loaded; None: it would.
    group: str | None = None  # The group whose rule unloads the others; None: memory.


class LoadForecaster(Protocol):
    def load_forecast(self, model: str, /) -> LoadForecast | None:
        """Return the load that a request would cause; None: it is not a model of this machine.

        Loads nothing, and takes at most milliseconds.
        """


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
        # Learned from each model's responses; outlives the model's instances.
        self._tokens: defaultdict[str, PromptTokens] = defaultdict(PromptTokens)
        self._corrections: defaultdict[str, Correction] = defaultdict(Correction)
        self._errors: dict[str, Histogram] = {}  # relative errors by model, of the first 64
        self._due_at_s = 0.0

    def estimate(self, request: ProxyRequest, *, is_own: bool = False) -> Estimate:
        """Estimate a request as if it came now.

        With `is_own`, only cache content of the same key counts.
        """
        router, model = self._router, request.model
        if is_own:
            request = router.as_client_knows(request)
        queue, is_loaded = router.queues[model], router.serves(model)
        load = self._loader.load_forecast(model) if self._loader and not is_loaded else None
        sets = router.registry.of_model(model).sets
        admissible = _admissible(request, sets)
        queued = queue_entry(request, (), self._clock())
        used, slots = sets.usage(admissible)
        slots = load.instances * load.slots if load else slots
        # Those before it that wait for a slot which is in use now; below 0: it finds a free slot.
        before = queue.place(queued) - max(0, slots - used)
        queue_s = queue.times.wait_s(before, slots) if before >= 0 else 0.0
        instance, cached, queue_s = self._soonest(queue, queued, sets, admissible, queue_s)
        length = PromptLength(request.prompt.tokens if request.prompt else 1, cached)
        name = instance.upstream.name if instance else f"{model}.0" if load else None
        found = Estimate(
            model,
            self._tokens[model].whole(length),
            self._tokens[model].new(length),
            name,
            is_loaded,
            length if request.prompt else None,
            load,
            others=queue.waiting + used,
        )
        rates = _rates(instance, queue)
        if name is None or rates is None or (load and (load.in_s is None or load.refusal)):
            return found
        factor = self._corrections[model].factor(found.others)
        first_s = factor * _first_token_s(queue_s, instance, found.new_tokens, rates)
        first_s += (load and load.in_s) or 0.0  # the correction is not for the load
        return replace(found, queue_s=factor * queue_s, first_token_s=first_s, factor=factor)

    def _soonest(
        self,
        queue: ModelQueue,
        queued: QueuedRequest,
        sets: InstanceSets,
        admissible: int,
        queue_s: float,
    ) -> tuple[RoutingTarget | None, int, float]:
        """Return the instance with the first token, its cached tokens, and the wait for its slot.

        Of many instances a few are compared: with most of the prompt cached, and of these and of
        all, the least loaded, those with a free slot, and the fastest.

        Args:
            admissible: The instances that may take the request.
            queue_s: The wait for any slot.
        """
        prompt, cache, found = queued.request.prompt, self._router.cache, []
        hint = cache.look_up(prompt, queued.session)
        held = cache.held_tokens(prompt) if prompt else []
        some = sets.bits_of({hint.owner}) & admissible if hint.owner else 0
        holders = [held_by for _, held_by in (*held[-_LEVELS_MAX:], *hint.cached[:_LEVELS_MAX])]
        for group in (*holders, -1):
            some |= sets.few(admissible & group)
        for instance in sets.members(some):
            parts = (tokens for tokens, holders in held if holders & instance.bit)
            wait_s, cached = queue_s, max(parts, default=0)
            if instance.upstream.node:
                cached = max(cached, hint.cached_tokens(instance.bit))
            if prompt and hint.conversation and hint.owner == instance.upstream.name:
                cached = max(cached, hint.conversation.known_tokens(prompt))  # its answers too
            if not (wait_s or instance.has_free_slot):
                wait_s = queue.times.wait_s(0, instance.upstream.slots)
            rates = _rates(instance, queue) or instance.rates
            new_tokens = (prompt.tokens if prompt else 1) - cached
            first_s = _first_token_s(wait_s, instance, new_tokens, rates)
            found.append((first_s, instance, cached, wait_s))
        first = min(found, key=itemgetter(0), default=None)
        return first[1:] if first else (None, 0, queue_s)

    @property
    def is_due(self) -> bool:
        """Whether the next request is one of the sample."""
        return self._clock() >= self._due_at_s

    @contextmanager
    def observe(self, request: ProxyRequest, record: AccessRecord) -> Iterator[None]:
        """Compare an estimate with the request in the block.

        Raises WaitTooLong: the estimate exceeds the client's limit.
        """
        now_s, found = self._clock(), None
        if request.prompt and request.kind.generates:
            found = self._try_estimate(request)
        self._note_spent(now_s)
        if found and request.wait_s:
            known = self._router.as_client_knows(request)
            own = found if known is request else self._try_estimate(known)
            _check(request, own or found, request.wait_s)
        try:
            yield
        finally:
            if found:  # soon: the request ends first
                loop = asyncio.get_running_loop()
                loop.call_soon(self._note_errors, found, record, now_s)

    def _note_spent(self, since_s: float) -> None:
        now_s = self._clock()
        pause_s = max(_PAUSE_MIN_S, _PAUSE_SHARE * (now_s - since_s))
        self._due_at_s = max(self._due_at_s, now_s + pause_s)

    def _try_estimate(self, request: ProxyRequest) -> Estimate | None:
        """Estimate a request; errors are noted and do not affect the request."""
        try:
            return self.estimate(request)
        except (ArithmeticError, LookupError, ValueError) as error:
            FAILURES.note("estimate", error)
            return None

    def _note_errors(self, found: Estimate, record: AccessRecord, at_s: float) -> None:
        timeline = record.timeline
        if found.length and record.timings and record.instance == found.instance:
            self._tokens[found.model].note(found.length, record.timings)
        if found.first_token_s is not None and timeline.first_token_ms is not None:
            real_s = timeline.began_at_s + timeline.first_token_ms / 1000 - at_s
            self._note_error(found.model, found.first_token_s, real_s)
            if found.load is None:
                uncorrected_s = found.first_token_s / found.factor
                self._corrections[found.model].note(found.others, uncorrected_s, real_s)

    def _note_error(self, model: str, estimated_s: float, real_s: float) -> None:
        if model in self._errors or len(self._errors) < _MODELS_MAX:
            real_s = max(real_s, _REAL_MIN_S)
            errors = self._errors.setdefault(model, Histogram(BOUNDS))
            errors.add(abs(estimated_s - real_s) / real_s)

    def collect(self) -> Iterator[Metric]:
        errors = {(model,): found for model, found in self._errors.items()}
        yield histogram("estimate_error_ratio", BOUNDS, errors)


def _admissible(request: ProxyRequest, sets: InstanceSets) -> int:
    """Return the instances that may take a request."""
    if request.remote_variant or request.adapter:
        return sum(instance.bit for instance in sets.instances if instance.may_take(request))
    return sets.local if request.is_from_proxy else sets.all


def _rates(instance: RoutingTarget | None, queue: ModelQueue) -> Rates | None:
    """Return the speeds of an instance, or before its first response those of its model."""
    return instance.rates if instance and instance.rates.answers else queue.rates


def _first_token_s(
    queue_s: float, instance: RoutingTarget | None, new_tokens: int, rates: Rates
) -> float:
    """Return when a prompt is computed: after those that the instance computes meanwhile."""
    backlog = instance.backlog_tokens if instance else 0
    return max(queue_s, backlog / rates.prefill_tps) + new_tokens / rates.prefill_tps


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
