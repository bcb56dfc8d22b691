"""Explains one request: its error, the use of its time, and why its prompt was not cached. Pure.

Everything is computed from the fields of `request.finished` (`proxy.observe.record`), whether the
request just ended or comes from the history. Error messages are not stored, because they may quote
a client: an error is explained by its code. The texts are in `explanation.toml`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final

from proxy.common.toml_text import table_beside
from proxy.observe.cache_finding import (
    BY_CLIENT,
    PLAIN,
    TOKENS_MIN,
    WITH_LOAD,
    CacheFinding,
    Cause,
    Tier,
    cache_finding,
)
from proxy.observe.record import PHASES


@cache
def _texts() -> Mapping[str, Any]:
    return table_beside(__file__)


_DISCONNECTED: Final = 499


def error_meaning(
    status: int, code: str | None, *, model: str | None, instance: str | None
) -> tuple[str, str | None]:
    """Return the meaning of an error, as a clause, and its cure, None if there is none.

    `status` is 400 to 599.
    """
    if status == _DISCONNECTED and code is None:
        return "the client disconnected before the end", None
    other = _texts()["other_errors"]["refused" if status < 500 else "broken"]
    known = _texts()["errors"].get(code, other)
    names = {"model": model or "the model", "instance": instance or "the server"}
    meaning, cure = (*(text.format(**names) for text in known), None)[:2]
    return meaning, cure


_OFTEN: Final = 2


def advice(cause: Cause) -> str | None:
    """Return what to do, or None if there is nothing to do."""
    found: str | None = _texts()["advice"].get(cause)
    return found


def cache_sentence(found: CacheFinding) -> str:
    """Return a sentence on the tokens found in the cache, and why not more."""
    waits = (
        (found.held_ms, "its slot was held for {:.1f} s for this turn while others waited"),
        (found.hold_wait_ms, "it waited {:.1f} s for slots that were held for agents' next turns"),
        (
            found.beginning_wait_ms,
            "it waited {:.1f} s for a request that computed the same beginning",
        ),
    )
    told = (text.format(wait_ms / 1000) for wait_ms, text in waits if wait_ms is not None)
    return "; ".join((_cache_sentence(found), *told))


def _cache_sentence(found: CacheFinding) -> str:
    if found.cause is Cause.ALL_FOUND:
        return f"{_found_clause(found)}: all that could be"
    if found.cause is Cause.FIRST_REQUEST:
        return _first(found)
    if change := _CHANGES.get(found.cause):
        about = "about " if found.is_about else ""
        place = f"{_place(found)} differs at {about}token {found.token} of {found.tokens}"
        return f"{place}: {change(found)}{_changes_clause(found)}"
    why = _texts()["losses"][found.cause].format(
        instance=f"instance {found.earlier_instance}",
        age="" if found.age_s is None else f" ({found.age_s:g} s ago)",
        wait=_wait(found),
        held="this one" if found.earlier else "its beginning",
    )
    no_file = _texts()["no_file"].get(found.no_file)
    on_disk = f"; {no_file}" if no_file else ""
    return f"{_found_clause(found)}, {found.reusable} could be: {why}{on_disk}"


def _changes_clause(found: CacheFinding) -> str:
    names = _texts()["changes"]
    named = [
        names[kind] if kind in {"order", "tools"} else f"{names[kind]}, characters {start} to {end}"
        for kind, start, end in found.changes
        if kind != "tools"
    ]
    return f" ({'; '.join(named)})" if named else ""


def _found_clause(found: CacheFinding) -> str:
    of_prompt = f"{found.found} of {found.tokens} prompt tokens were"
    if found.ahead and found.tier != Tier.DISK:
        return f"{of_prompt} in the cache ({found.ahead} computed ahead)"
    if found.tier != Tier.DISK:
        return f"{of_prompt} in the cache"
    if found.restore_ms is None:
        return f"{of_prompt} on disk, restored when the engine started"
    return f"{of_prompt} on disk, restored in {found.restore_ms / 1000:.2f} s"


def _first(found: CacheFinding) -> str:
    if found.is_continued:
        return (
            "this server has not seen the conversation before (it may have begun elsewhere, or "
            f"before the daemon started): {_found_clause(found)}"
        )
    if found.found:
        return f"the first request of a conversation: {_found_clause(found)}, shared with others"
    return f"the first request of a conversation: all {found.tokens} prompt tokens were computed"


def _place(found: CacheFinding) -> str:
    if found.role == "tools":
        return "the list of tools"
    if found.message is not None:
        return f"message {found.message}"
    return "the system prompt" if found.role == "system" else "the prompt"


def _system(found: CacheFinding) -> str:
    if found.repeated >= _OFTEN:
        return "your client changes its system prompt on every request"
    return f"your client sent another system prompt{_comparison_clause(found)}"


def _tools(found: CacheFinding) -> str:
    if found.repeated >= _OFTEN:
        return "your client sends other tools with every request"
    return f"your client sent other tools{_comparison_clause(found)}"


def _truncation_sentence(found: CacheFinding) -> str:
    left_out = "a message" if found.dropped == 1 else f"{found.dropped} messages"
    return f"your client left out {left_out} that its request {found.earlier} had there"


def _change_sentence(found: CacheFinding) -> str:
    if found.role == "assistant":
        return "your client does not send the model's answer back as it was"
    return f"your client changed it{_comparison_clause(found)}"


def _comparison_clause(found: CacheFinding) -> str:
    return f" than in its request {found.earlier}" if found.earlier else ""


def _wait(found: CacheFinding) -> str:
    if found.is_awaited:
        return "which had no slot free; it waited for one as long as that was worth it"
    return "which was busy, slower or failing"


_CHANGES: Final[Mapping[Cause, Callable[[CacheFinding], str]]] = MappingProxyType(
    {
        Cause.SYSTEM_PROMPT_CHANGED: _system,
        Cause.TOOLS_CHANGED: _tools,
        Cause.HISTORY_TRUNCATED: _truncation_sentence,
        Cause.MESSAGE_CHANGED: _change_sentence,
    }
)
# Waits below both limits are not mentioned.
_NOTED_MIN_MS: Final = 50.0
_NOTED_MIN_SHARE: Final = 0.1

# Errors of requests that waited for a slot but got no instance.
_OF_SLOTS: Final = frozenset({"queue_timeout", "wait_too_long", "queue_full", "request_cancelled"})
# Members of a cache finding that describe the found tokens.
_OF_FOUND: Final = frozenset({"tier", "restore_ms", "saved_ms"})


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause; `cost_ms` is the time that it cost, as far as known."""

    cause: Cause
    cost_ms: float
    sentence: str
    advice: str | None


@dataclass(frozen=True, slots=True)
class Explanation:
    request: str
    model: str | None
    instance: str | None
    status: int | None  # HTTP status; None while the request is being answered.
    code: str | None
    findings: tuple[Finding, ...]  # The error first, then by descending cost.
    phases_ms: Mapping[str, float]
    duration_ms: float | None
    first_token_ms: float | None
    expected_cached_tokens: int | None
    # See `CacheFinding.as_fields`; None if the engine reported nothing.
    cache: Mapping[str, Any] | None
    rules: Sequence[str] = ()  # The prompt rules that changed the prompt.

    @property
    def cause(self) -> Cause | None:
        return self.findings[0].cause if self.findings else None

    def as_json(self) -> dict[str, Any]:
        first = self.findings[0] if self.findings else None
        return {
            **asdict(self),
            "cause": self.cause,
            "sentence": first.sentence if first else None,
            "advice": first.advice if first else None,
        }


def explain(fields: Mapping[str, Any]) -> Explanation:
    """Explain a request from the fields of its event."""
    cache = _cache(fields)
    phases_ms: dict[str, float] = {
        phase: ms for phase in PHASES if (ms := _ms(fields, f"{phase}_ms")) is not None
    }
    waits = tuple(_waits(fields, cache))
    findings = (*waits, *_call_findings(fields), *_cache_findings(fields, cache))
    ordered = sorted(findings, key=lambda finding: (finding.cause in PLAIN, -finding.cost_ms))
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
        tuple((fields.get("rules") or "").split()),
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
        return  # its phases show the wait, and the error its reason
    for cause, row in ((Cause(name), row) for name, row in _texts()["waits"].items()):
        cost_ms = _sum_ms(fields, cause)
        is_told = cache is not None and cause in _waits_of(cache)
        least_ms = max(_NOTED_MIN_MS, _NOTED_MIN_SHARE * (_ms(fields, "duration_ms") or 0.0))
        if cause is Cause.LOADING and _ms(fields, "gave_way_ms") is not None:
            least_ms = 0.0  # it was not loaded for a reason that the client cannot know
        if cost_ms >= least_ms and not is_told:
            told = f"{cost_ms / 1000:.1f} s {row['text'].format(model=fields.get('model'))}"
            told += _load_clauses(fields) if cause is Cause.LOADING else ""
            yield Finding(cause, cost_ms, told, advice(cause))


def _load_clauses(fields: Mapping[str, Any]) -> str:
    texts, told = _texts()["waits"][Cause.LOADING], ""
    if (gave_way_ms := _ms(fields, "gave_way_ms")) is not None:
        told += texts["gave_way"].format(gave_way_s=gave_way_ms / 1000)
    if group := fields.get("load_group"):
        told += texts["group"].format(group=group)
    return told


def _call_findings(fields: Mapping[str, Any]) -> Iterator[Finding]:
    if counts := fields.get("tool_calls"):
        told = [
            text.format(counts[name]) for name, text in _texts()["calls"].items() if name in counts
        ]
        sentence = f"the model broke calls of tools: {', '.join(told)}"
        cause = Cause.BROKEN_TOOL_CALL
        yield Finding(cause, 0.0, sentence, advice(cause))


def _cache_findings(fields: Mapping[str, Any], cache: CacheFinding | None) -> Iterator[Finding]:
    if cache is None:
        yield from _short_answer_finding(fields)
        return
    computed = max(1, cache.tokens - cache.found)
    prefill_ms = max(0.0, (_ms(fields, "prefill_ms") or 0.0) - (cache.restore_ms or 0.0))
    cost_ms = prefill_ms * min(1.0, cache.lost / computed)
    for cause in _waits_of(cache):
        cost_ms += _sum_ms(fields, cause)
    told = cache_sentence(cache)
    told += _load_clauses(fields) if Cause.LOADING in _waits_of(cache) else ""
    yield Finding(cache.cause, round(cost_ms, 1), told, advice(cache.cause))


def _short_answer_finding(fields: Mapping[str, Any]) -> Iterator[Finding]:
    counts = fields.get("prompt_tokens"), fields.get("cached_tokens")
    tokens = sum(count for count in counts if isinstance(count, int))
    if 0 < tokens < TOKENS_MIN:
        told = f"the prompt has {tokens} tokens: too few for the cache to matter"
        yield Finding(Cause.SHORT_PROMPT, 0.0, told, None)


def _waits_of(cache: CacheFinding) -> frozenset[Cause]:
    if cache.cause in WITH_LOAD:
        return frozenset({Cause.LOADING})
    is_for_owner = cache.cause is Cause.OTHER_INSTANCE and cache.is_awaited
    waits_ms = cache.beginning_wait_ms, cache.hold_wait_ms
    is_told = is_for_owner or any(wait_ms is not None for wait_ms in waits_ms)
    return frozenset({Cause.QUEUE}) if is_told else frozenset()


def _sum_ms(fields: Mapping[str, Any], cause: Cause) -> float:
    return sum(_ms(fields, name) or 0.0 for name in _texts()["waits"][cause]["phases"])


def _ms(fields: Mapping[str, Any], name: str) -> float | None:
    value = fields.get(name)
    return float(value) if isinstance(value, int | float) else None


# Rules that undo changes of a system prompt, and all kinds of values that they know.
_VALUE_KINDS: Final = frozenset({"header", "uuid", "time", "date", "path", "number", "block"})


def changes_by_client(requests: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Gather a client's changes in the prompts of past requests, the costliest first.

    Each has its place (`role`, `message`, characters `start` to `end`), its `kind`, the `days` on
    which it changed, how many new `conversations` and later `turns` did, the `tokens` computed
    again, and the `rules` that would undo it. The tokens of a request count for its first change.
    """
    found: list[dict[str, Any]] = []
    for fields in requests:
        cache = _cache(fields)
        if cache is None or not cache.lost or cache.cause not in BY_CLIENT:
            continue
        lost = cache.lost
        for kind, start, end in cache.changes:
            place = {"role": cache.role, "message": cache.message, "kind": kind}
            same = (
                row
                for row in found
                if place.items() <= row.items() and start <= row["end"] and row["start"] <= end
            )
            if (row := next(same, None)) is None:
                row = {**place, "start": start, "end": end, "days": set()}
                row |= {"conversations": 0, "turns": 0, "tokens": 0}
                found.append(row)
            row["start"], row["end"] = min(start, row["start"]), max(end, row["end"])
            row["days"].add(str(fields.get("ended_at"))[: len("2026-11-24")])
            row["turns" if cache.is_continued else "conversations"] += 1
            row["tokens"] += lost
            lost = 0
    for row in found:
        row["days"], row["rules"] = len(row["days"]), _rules_for(row)
    return sorted(found, key=lambda row: -int(row["tokens"]))


def _rules_for(row: Mapping[str, Any]) -> list[str]:
    if row["kind"] == "order":
        return ["sort-tools"]
    if row["role"] != "system" or row["kind"] not in _VALUE_KINDS:
        return []
    verbs = {"freeze": row["turns"], "move": row["conversations"]}
    return [f"{verb}:{row['kind']}" for verb, count in verbs.items() if count]


def change_text(row: Mapping[str, Any]) -> str:
    """Return the place and the kind of one of `changes_by_client`."""
    if row["role"] == "tools":
        return f"the list of tools: {_texts()['changes'][row['kind']]}"
    place = "the system prompt" if row["message"] is None else f"message {row['message']}"
    kind = _texts()["changes"][row["kind"]]
    return f"{place}, characters {row['start']} to {row['end']}: {kind}"


def own_figures(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures that a client may see of its request if others share its caches.

    Tokens that other clients left in caches count as computed; without a finding, all cached tokens
    do.
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
    if "saved_ms" in shown:
        shown["saved_ms"] = round(shown["saved_ms"] * found / cached, 1)
    return {
        **fields,
        "cached_tokens": found,
        "prompt_tokens": (fields.get("prompt_tokens") or 0) + cached - found,
        "expected_cached_tokens": min(fields.get("expected_cached_tokens") or 0, own),
        "cache_tier": fields.get("cache_tier") if found else None,
        "cache": shown or None,
    }
