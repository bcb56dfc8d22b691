"""Why a prompt was not found in the cache: a decision from hashes and figures. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from proxy.explanation.causes import PLAIN, Cause
from proxy.explanation.difference import Difference, difference
from proxy.prompt_cache.no_file import NoFile
from proxy.prompt_cache.outline import Hashes
from proxy.slot_files.tiers import Tier

# An engine computes at least the last token again, and a template ends differently before an answer
# than after it. Fewer tokens, or a smaller share of the prompt, are no miss.
_MISS_MIN_TOKENS: Final = 32
_MISS_MIN_SHARE: Final = 0.05
# Shared beginnings of prompts that belong to no common conversation: less is a coincidence.
_SHARED_MIN_BYTES: Final = 128
# A position from hashes is one from the engine's own count if they differ by no more than this.
_SAME_PLACE_TOKENS: Final = 24
_SAME_PLACE_SHARE: Final = 0.15


class Held(StrEnum):
    """Where the earlier prompt's cache was when the request began."""

    SLOT = "slot"
    """In the slot that the request got."""
    TAKEN = "taken"
    """In no slot any more: another conversation had taken it."""
    BUSY = "busy"
    """In a slot that another request of the conversation used."""
    OTHER = "other"
    """In another instance."""
    UNLOADED = "unloaded"
    """In a process that was stopped."""
    CRASHED = "crashed"
    """In a process that ended by itself."""
    UNKNOWN = "unknown"


class CacheKind(StrEnum):
    """From where an engine can go on with a prompt that it holds."""

    ANY = "any"
    WINDOW = "window"
    """Of a sliding window, only from its end, or a checkpoint."""
    RECURRENT = "recurrent"


_LOST_WITH: Final = MappingProxyType(
    {
        Held.BUSY: Cause.SLOT_BUSY,
        Held.OTHER: Cause.OTHER_INSTANCE,
        Held.CRASHED: Cause.ENGINE_RESTARTED,
        Held.UNLOADED: Cause.MODEL_UNLOADED,
    }
)
_LIMITED_BY: Final = MappingProxyType(
    {
        CacheKind.ANY: Cause.NOT_FOUND,
        CacheKind.WINDOW: Cause.SLIDING_WINDOW,
        CacheKind.RECURRENT: Cause.RECURRENT_STATE,
    }
)


class Earlier(NamedTuple):
    """An earlier prompt of the client.

    Attributes:
        request: Its id.
        prompt_tokens: As the engine counted them.
        is_same_conversation: Whether this one continues it; else it is only the latest of the
            client's that begins the same way.
    """

    request: str
    instance: str
    hashes: Hashes
    prompt_tokens: int
    age_s: float
    is_same_conversation: bool


class CacheFacts(NamedTuple):
    """What is known of one prompt and of the caches, when its response ends.

    Attributes:
        tokens: Of the prompt, as the engine counted them.
        found: Of those, in the cache.
        expected: Those that the router expected in the cache of the instance.
        is_continued: Whether the prompt has an assistant's message: it is no first turn.
        is_known: Whether the router knew the conversation.
        is_awaited: Whether the request waited for the instance that held the earlier prompt.
        is_cache_off: The request said so.
        tier: Where it was found; None where that is not known.
        restore_ms: How long the restore of a slot file took, for `Tier.DISK`.
    """

    hashes: Hashes
    tokens: int
    found: int
    expected: int
    instance: str
    held: Held
    kind: CacheKind = CacheKind.ANY
    earlier: Earlier | None = None
    is_continued: bool = False
    is_known: bool = False
    is_awaited: bool = False
    is_cache_off: bool = False
    tier: Tier | None = None
    restore_ms: float | None = None


class CacheFinding(NamedTuple):
    """What was found of a prompt in the cache, and why not more. Figures only.

    Attributes:
        tokens: Of the prompt.
        found: In the cache.
        reusable: That the caches would have held, had nothing been changed or lost.
        shared: Equal from the start to the earlier prompt; None without one, or where all was.
        token: The first that differs, from 1; None where none does.
        is_about: It is estimated from the sizes of texts.
        message: The client's number of the message that differs, from 0.
        role: Of what differs.
        dropped: Messages that the client left out.
        repeated: In how many requests of the client, one after the other, it was the same cause.
        earlier: The id of the request that is compared.
        earlier_instance: The one that computed it.
        age_s: Since it ended.
        is_continued: As of `CacheFacts`, as are `is_awaited`, `tier` and `restore_ms`.
        no_file: Why what was lost was in no slot file either; None where that is not known.
        own: What earlier requests of the same key can have left in caches, where that is less than
            was found or could be.
    """

    cause: Cause
    tokens: int
    found: int
    reusable: int
    shared: int | None = None
    token: int | None = None
    is_about: bool = False
    message: int | None = None
    role: str | None = None
    dropped: int = 0
    repeated: int = 1
    earlier: str | None = None
    earlier_instance: str | None = None
    age_s: float | None = None
    is_continued: bool = False
    is_awaited: bool = False
    tier: Tier | None = None
    restore_ms: float | None = None
    no_file: NoFile | None = None
    own: int | None = None

    @property
    def lost(self) -> int:
        """Tokens that were computed although the caches could have held them; 0 if few."""
        return 0 if self.cause in PLAIN else max(0, self.reusable - self.found)

    def repeating(self, repeated: int) -> CacheFinding:
        """Return it with how often its cause came."""
        return self if repeated == self.repeated else self._replace(repeated=repeated)

    def without_file(self, no_file: NoFile | None) -> CacheFinding:
        return self._replace(no_file=no_file)

    def as_fields(self) -> dict[str, Any]:
        """As JSON, without what says nothing."""
        usual = self._field_defaults
        figures = zip(self._fields, self, strict=True)
        return {name: value for name, value in figures if name not in usual or value != usual[name]}


def cache_finding(written: Mapping[str, Any]) -> CacheFinding:
    """Read `as_fields`; raises ValueError, KeyError or TypeError."""
    kept = {name: value for name, value in written.items() if name in CacheFinding._fields}
    return CacheFinding(**{**kept, "cause": Cause(kept["cause"])})


def find_cause(facts: CacheFacts) -> CacheFinding:
    """Decide why not all of a prompt that could be in the cache was found there."""
    earlier, found = facts.earlier, facts.found
    plain = CacheFinding(
        Cause.ALL_FOUND if earlier or facts.is_known else Cause.FIRST_REQUEST,
        facts.tokens,
        found,
        found,
        earlier=earlier.request if earlier else None,
        earlier_instance=earlier.instance if earlier else None,
        age_s=round(earlier.age_s, 1) if earlier else None,
        is_continued=facts.is_continued,
        is_awaited=facts.is_awaited,
        tier=facts.tier,
        restore_ms=facts.restore_ms,
    )
    if earlier is None:
        return _without_earlier(facts, plain)
    if not _is_miss(facts.tokens - 1, facts):
        return plain
    return _compared(facts, earlier, plain)


def _compared(facts: CacheFacts, earlier: Earlier, plain: CacheFinding) -> CacheFinding:
    found = difference(earlier.hashes, facts.hashes)
    if found is None:
        reusable = min(earlier.prompt_tokens, facts.tokens - 1)
        if not earlier.is_same_conversation:
            return _without_earlier(facts, plain)
        return _lost(facts, plain._replace(reusable=reusable), reusable)
    if not earlier.is_same_conversation and not _is_of_client(found):
        return _without_earlier(facts, plain)
    return _changed(facts, plain, found)


def _without_earlier(facts: CacheFacts, plain: CacheFinding) -> CacheFinding:
    """Judge the first request of a conversation, by what the router expected to be shared."""
    first = plain if facts.is_known else plain._replace(cause=Cause.FIRST_REQUEST)
    if facts.expected >= 2 * max(facts.found, _MISS_MIN_TOKENS):
        reusable = min(facts.expected, facts.tokens - 1)
        return _lost(facts._replace(held=Held.TAKEN), first._replace(reusable=reusable), None)
    return first


def _changed(facts: CacheFacts, plain: CacheFinding, found: Difference) -> CacheFinding:
    """Judge a prompt that the client changed: what that cost, and what was lost besides."""
    total_bytes = max(1, facts.hashes.outline.size_bytes)
    estimate = round(found.shared_bytes * facts.tokens / total_bytes)
    is_exact = facts.kind is CacheKind.ANY and _is_same_place(estimate, facts)
    if facts.held is Held.SLOT and facts.kind is CacheKind.ANY and found.role == "tools":
        is_exact = True  # a template may put them elsewhere than before all else
    shared = facts.found if is_exact else max(estimate, facts.found)
    known = round(found.known_bytes * facts.tokens / total_bytes)
    reusable = min(max(known, shared), facts.tokens - 1)
    told = plain._replace(
        cause=found.cause,
        reusable=reusable,
        shared=shared,
        token=min(shared + 1, facts.tokens),
        is_about=not is_exact,
        message=found.message,
        role=found.role,
        dropped=found.dropped,
    )
    if not _is_miss(reusable, facts):
        return told._replace(cause=Cause.ALL_FOUND)
    is_seen = facts.held is not Held.UNKNOWN or facts.kind is not CacheKind.ANY
    if is_seen and shared - facts.found > reusable - shared:
        return _lost(facts, told, shared)
    return told


def _lost(facts: CacheFacts, told: CacheFinding, shared: int | None) -> CacheFinding:
    """Judge a prompt whose cache was lost, or could not be used."""
    told = told._replace(shared=shared)
    if not _is_miss(told.reusable, facts):
        return told._replace(cause=told.cause if told.cause in PLAIN else Cause.ALL_FOUND)
    cause = _cause_of_loss(facts, is_extension=shared == told.reusable)
    return told._replace(cause=cause)


def _cause_of_loss(facts: CacheFacts, *, is_extension: bool) -> Cause:
    if facts.is_cache_off:
        return Cause.CACHE_OFF
    if facts.held in _LOST_WITH:
        return _LOST_WITH[facts.held]
    if facts.held is Held.TAKEN and (is_extension or facts.kind is CacheKind.ANY):
        return Cause.SLOT_EVICTED
    return _LIMITED_BY[facts.kind]


def _is_miss(reusable: int, facts: CacheFacts) -> bool:
    least = max(_MISS_MIN_TOKENS, _MISS_MIN_SHARE * facts.tokens)
    return reusable - facts.found > least


def _is_of_client(found: Difference) -> bool:
    """Whether two conversations differ in what a client's conversations have in common."""
    is_common = found.cause in {Cause.SYSTEM_PROMPT_CHANGED, Cause.TOOLS_CHANGED}
    return is_common and found.shared_bytes >= _SHARED_MIN_BYTES


def _is_same_place(estimate: int, facts: CacheFacts) -> bool:
    least = max(_SAME_PLACE_TOKENS, _SAME_PLACE_SHARE * estimate)
    return facts.found > 0 and abs(estimate - facts.found) <= least
