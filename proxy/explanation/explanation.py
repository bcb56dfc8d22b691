"""One request explained: its error, where its time went, and why its prompt was not cached. Pure.

All of it is computed from the fields of `request.finished` (`proxy.access_log`), whether they come
from a request that just ends or from the history.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final

from proxy.explanation.cache_finding import CacheFinding, cache_finding
from proxy.explanation.causes import PLAIN, TOKENS_MIN, WITH_LOAD, Cause
from proxy.explanation.errors import error_meaning
from proxy.explanation.sentences import advice, cache_sentence
from proxy.timeline import PHASES

# Of waits that take less, and less of the whole, nothing is said.
_NOTED_MIN_MS: Final = 50.0
_NOTED_MIN_SHARE: Final = 0.1

# Errors of requests that no instance got, though there were some: they waited for a slot.
_OF_SLOTS: Final = frozenset({"queue_timeout", "wait_too_long", "queue_full", "request_cancelled"})
_WAITS: Final = MappingProxyType(
    {
        Cause.QUEUE: (("queued_ms",), "waited for a slot of {model}: all were in use"),
        Cause.LOADING: (("evict_ms", "load_ms"), "waited for {model} to load"),
        Cause.SLOW_CLIENT: (("stalled_ms",), "waited for the client to read what was sent"),
    }
)

# Members of a cache finding that tell of what was found.
_OF_FOUND: Final = frozenset({"tier", "restore_ms"})


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause; `cost_ms` is what it cost, as far as that is known."""

    cause: Cause
    cost_ms: float
    sentence: str
    advice: str | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """One request.

    Attributes:
        status: As HTTP; None as long as the request is answered.
        code: Of the error.
        findings: That of the error first, then the one that cost most.
        phases_ms: Milliseconds of each phase; without those that are not known.
        expected_cached_tokens: That the router expected.
        cache: As of `CacheFinding.as_fields`; None where the engine told nothing.
    """

    request: str
    model: str | None
    instance: str | None
    status: int | None
    code: str | None
    findings: tuple[Finding, ...]
    phases_ms: Mapping[str, float]
    duration_ms: float | None
    first_token_ms: float | None
    expected_cached_tokens: int | None
    cache: Mapping[str, Any] | None

    @property
    def cause(self) -> Cause | None:
        return self.findings[0].cause if self.findings else None

    def as_json(self) -> dict[str, Any]:
        first = self.findings[0] if self.findings else None
        return {
            "request": self.request,
            "model": self.model,
            "instance": self.instance,
            "status": self.status,
            "code": self.code,
            "cause": self.cause,
            "sentence": first.sentence if first else None,
            "advice": first.advice if first else None,
            "duration_ms": self.duration_ms,
            "first_token_ms": self.first_token_ms,
            "phases_ms": dict(self.phases_ms),
            "expected_cached_tokens": self.expected_cached_tokens,
            "cache": self.cache and dict(self.cache),
            "findings": [asdict(finding) for finding in self.findings],
        }


def explain(fields: Mapping[str, Any]) -> Explanation:
    """Explain a request by the fields of its event."""
    cache = _cache(fields)
    phases_ms: dict[str, float] = {
        one: ms for one in PHASES if (ms := _ms(fields, f"{one}_ms")) is not None
    }
    waits = tuple(_waits(fields, cache))
    findings = (*waits, *_cache_findings(fields, cache))
    ordered = sorted(findings, key=lambda one: (one.cause in PLAIN, -one.cost_ms))
    return Explanation(
        str(fields.get("request", "")),
        fields.get("model"),
        fields.get("instance"),
        fields.get("status"),
        fields.get("code"),
        (*_error(fields), *ordered),
        phases_ms,
        _ms(fields, "duration_ms"),
        _ms(fields, "first_token_ms"),
        fields.get("expected_cached_tokens"),
        cache.as_fields() if cache else None,
    )


def _cache(fields: Mapping[str, Any]) -> CacheFinding | None:
    written = fields.get("cache")
    if not isinstance(written, Mapping):
        return None
    try:
        return cache_finding(written)
    except (ValueError, KeyError, TypeError):
        return None  # written by another version


def _error(fields: Mapping[str, Any]) -> Iterator[Finding]:
    status, code = fields.get("status"), fields.get("code")
    if not isinstance(status, int) or status < HTTPStatus.BAD_REQUEST:
        return
    meaning, cure = error_meaning(
        status, code, model=fields.get("model"), instance=fields.get("instance")
    )
    title = f"{status} {code}" if code else str(status)
    yield Finding(Cause.ERROR, 0.0, f"{title}: {meaning}", cure)


def _waits(fields: Mapping[str, Any], cache: CacheFinding | None) -> Iterator[Finding]:
    code = fields.get("code")
    if code is not None and fields.get("instance") is None and code not in _OF_SLOTS:
        return  # its phases tell how long it waited, and the error why
    for cause, (_, sentence) in _WAITS.items():
        cost_ms = _sum_ms(fields, cause)
        is_told = cache is not None and cause in _waits_of(cache)
        least_ms = max(_NOTED_MIN_MS, _NOTED_MIN_SHARE * (_ms(fields, "duration_ms") or 0.0))
        if cost_ms >= least_ms and not is_told:
            told = f"{cost_ms / 1000:.1f} s {sentence.format(model=fields.get('model'))}"
            yield Finding(cause, cost_ms, told, advice(cause))


def _cache_findings(fields: Mapping[str, Any], cache: CacheFinding | None) -> Iterator[Finding]:
    if cache is None:
        yield from _short(fields)
        return
    computed = max(1, cache.tokens - cache.found)
    prefill_ms = max(0.0, (_ms(fields, "prefill_ms") or 0.0) - (cache.restore_ms or 0.0))
    cost_ms = prefill_ms * min(1.0, cache.lost / computed)
    for cause in _waits_of(cache):
        cost_ms += _sum_ms(fields, cause)
    yield Finding(cache.cause, round(cost_ms, 1), cache_sentence(cache), advice(cache.cause))


def _short(fields: Mapping[str, Any]) -> Iterator[Finding]:
    counts = fields.get("prompt_tokens"), fields.get("cached_tokens")
    tokens = sum(one for one in counts if isinstance(one, int))
    if 0 < tokens < TOKENS_MIN:
        told = f"the prompt has {tokens} tokens: too few for the cache to matter"
        yield Finding(Cause.SHORT_PROMPT, 0.0, told, None)


def _waits_of(cache: CacheFinding) -> frozenset[Cause]:
    """Return the waits that have the same cause as what was not in the cache."""
    if cache.cause in WITH_LOAD:
        return frozenset({Cause.LOADING})
    is_for_owner = cache.cause is Cause.OTHER_INSTANCE and cache.is_awaited
    return frozenset({Cause.QUEUE}) if is_for_owner else frozenset()


def _sum_ms(fields: Mapping[str, Any], cause: Cause) -> float:
    return sum(_ms(fields, name) or 0.0 for name in _WAITS[cause][0])


def _ms(fields: Mapping[str, Any], name: str) -> float | None:
    value = fields.get(name)
    return float(value) if isinstance(value, int | float) else None


def own_figures(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a request as its client may see them, if others share its caches.

    What other clients left in caches counts as computed. Of a prompt whose finding is not known,
    everything does.
    """
    cache, cached = fields.get("cache"), fields.get("cached_tokens")
    own = cache.get("own") if cache else 0
    if own is None or cached is None:
        return dict(fields)
    found = min(cached, own)
    limits = {"found": own, "reusable": own, "shared": own}
    shown = {
        name: min(value, limits.get(name, value)) if value else value
        for name, value in (cache or {}).items()
        if name != "own" and (found or name not in _OF_FOUND)
    }
    return {
        **fields,
        "cached_tokens": found,
        "prompt_tokens": (fields.get("prompt_tokens") or 0) + cached - found,
        "expected_cached_tokens": min(fields.get("expected_cached_tokens") or 0, own),
        "cache_tier": fields.get("cache_tier") if found else None,
        "cache": shown or None,
    }
