"""Explains why a prompt was not found in the cache, from hashes and counts. Pure.

A prompt is compared with the latest prompt of its conversation, which is kept as hashes: the first
difference, and its kind. A conversation is found by the hashes of its turns (`conversations`). A
client that changes its system prompt or its tools, or drops old messages, seems to begin another
conversation: it is found by its last messages, which the next request repeats, or else by the
client's latest prompts with the same beginning. Bounded: the least recently used conversations go
first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import Any, Final, Literal, NamedTuple

from xxhash import xxh3_64_intdigest

from proxy.cache.holders import Conversation, Run
from proxy.cache.prompt import (
    BLOCK_BYTES,
    COMMON,
    Outline,
    Prompt,
    answer_parts,
    part_hashes,
    shared_blocks,
)
from proxy.cache.prompt_rules import ValueHashes, find_changes
from proxy.observe.cache_finding import PLAIN, CacheFinding, Cause, Tier
from proxy.upstream.endpoint_kinds import EndpointKind

# A client that drops old messages may insert a few other messages.
_INSERTED_MAX: Final = 3


def _first_difference(earlier: Outline, later: Outline) -> int | None:
    """Return the first part that differs, or None if one prompt begins with the other."""
    pairs = enumerate(zip(earlier.hashes, later.hashes, strict=False))
    return next((at for at, (a, b) in pairs if a != b), None)


def _cause(earlier: Outline, later: Outline, part: int) -> tuple[Cause, int]:
    roles = {earlier.role(part), later.role(part)}
    if "tools" in roles:
        return Cause.TOOLS_CHANGED, 0
    if dropped := _count_dropped(earlier, later, part):
        return Cause.HISTORY_TRUNCATED, dropped
    if "system" in roles:
        return Cause.SYSTEM_PROMPT_CHANGED, 0
    return Cause.MESSAGE_CHANGED, 0


def _count_dropped(earlier: Outline, later: Outline, part: int) -> int:
    """Return how many messages were dropped before a part that the earlier prompt also has."""
    places = {block_hash: at for at, block_hash in enumerate(earlier.hashes) if at > part}
    for at in range(part, min(part + _INSERTED_MAX, len(later.hashes))):
        place = places.get(later.hashes[at], at)
        if place > at and earlier.role(part) != "system":
            return max(1, earlier.messages[place] - earlier.messages[part])
    return 0


# An engine always recomputes the last token, and a template ends differently before an answer than
# after it. Below both limits it is no miss.
_MISS_MIN_TOKENS: Final = 32
_MISS_MIN_SHARE: Final = 0.05
# A shorter shared beginning of two conversations is a coincidence.
_SHARED_MIN_BYTES: Final = 128
# A position estimated from hashes equals the engine's count if they differ by at most this.
_SAME_PLACE_TOKENS: Final = 24
_SAME_PLACE_SHARE: Final = 0.15


# The place of the earlier prompt's cache when the request began: in the request's slot; in no slot
# any more, because another conversation had taken its slot; in a slot in use by another request of
# the conversation; in another instance; in a process that was stopped, or that ended without being
# stopped.
CachePlace = Literal["slot", "taken", "busy", "other", "unloaded", "crashed", "unknown"]
# The positions from which an engine can continue a cached prompt. With a sliding window: only from
# its end or a checkpoint.
CacheKind = Literal["any", "window", "recurrent"]

# Two conversations of a client may differ in these, and share the rest.
_COMMON_CAUSES: Final = frozenset({Cause.SYSTEM_PROMPT_CHANGED, Cause.TOOLS_CHANGED})

_LOST_WITH: Final[Mapping[CachePlace, Cause]] = {
    "busy": Cause.SLOT_BUSY,
    "other": Cause.OTHER_INSTANCE,
    "crashed": Cause.ENGINE_RESTARTED,
    "unloaded": Cause.MODEL_UNLOADED,
}
_LIMITED_BY: Final[Mapping[CacheKind, Cause]] = {
    "any": Cause.NOT_FOUND,
    "window": Cause.SLIDING_WINDOW,
    "recurrent": Cause.RECURRENT_STATE,
}


class CacheFacts(NamedTuple):
    """The facts about one prompt and the caches, at the end of its response."""

    prompt: Prompt
    tokens: int  # Prompt tokens, counted by the engine.
    found_tokens: int
    expected_tokens: int  # Tokens that the router expected in the instance's cache.
    place: CachePlace
    kind: CacheKind = "any"
    earlier: RecentPrompt | None = None  # The client's prompt before.
    age_s: float = 0.0
    # Whether the new prompt continues it; otherwise it is only the client's latest prompt with the
    # same beginning.
    is_same_conversation: bool = False
    # Whether the prompt has an assistant's message, so it is no first turn.
    is_continued: bool = False
    is_known: bool = False
    is_awaited: bool = False  # Whether the request waited for the instance with the earlier prompt.
    is_cache_off: bool = False
    tier: Tier | None = None
    restore_ms: float | None = None  # Duration of restoring a slot file, for `Tier.DISK`.


def find_cause(facts: CacheFacts) -> CacheFinding:
    """Return why less of a prompt was found in the cache than could have been there."""
    earlier, found = facts.earlier, facts.found_tokens
    plain = CacheFinding(
        Cause.ALL_FOUND if earlier or facts.is_known else Cause.FIRST_REQUEST,
        facts.tokens,
        found,
        found,
        earlier=earlier.request_id if earlier else None,
        earlier_instance=earlier.run.name if earlier else None,
        age_s=round(facts.age_s, 1) if earlier else None,
        is_continued=facts.is_continued,
        is_awaited=facts.is_awaited,
        tier=facts.tier,
        restore_ms=facts.restore_ms,
    )
    if earlier is None:
        return _without_earlier(facts, plain)
    if not _is_miss(facts.tokens - 1, facts):
        return plain
    return _compare_prompts(facts, earlier, plain)


def _compare_prompts(facts: CacheFacts, earlier: RecentPrompt, plain: CacheFinding) -> CacheFinding:
    before, now = earlier.outline, facts.prompt.outline
    part = _first_difference(before, now)
    if part is None:
        reusable = min(earlier.prompt_tokens, facts.tokens - 1)
        if not facts.is_same_conversation:
            return _without_earlier(facts, plain)
        return _judge_loss(facts, plain._replace(reusable=reusable), reusable)
    cause, dropped = _cause(before, now, part)
    # All parts before it are equal, and whole blocks of it.
    blocks = shared_blocks(earlier.blocks, facts.prompt.blocks)
    shared_bytes = max(sum(now.sizes_bytes[:part]), blocks * BLOCK_BYTES)
    is_common = cause in _COMMON_CAUSES
    is_of_client = is_common and shared_bytes >= _SHARED_MIN_BYTES
    if not facts.is_same_conversation and not is_of_client:
        return _without_earlier(facts, plain)
    # The parts that the earlier prompt had anywhere, and a replaced system prompt or tools.
    known, sizes = set(before.hashes), zip(now.hashes, now.sizes_bytes, strict=True)
    known_bytes = sum(size for part_hash, size in sizes if part_hash in known)
    known_bytes += now.sizes_bytes[part] if is_common else 0
    role, message = now.role(part), now.messages[part]
    if cause is Cause.TOOLS_CHANGED:  # even if it has none any more
        role, message = "tools", -1
    told = plain._replace(
        cause=cause, role=role, message=message if message >= 0 else None, dropped=dropped
    )
    return _judge_change(facts, told, shared_bytes, known_bytes)


def _without_earlier(facts: CacheFacts, plain: CacheFinding) -> CacheFinding:
    first = plain if facts.is_known else plain._replace(cause=Cause.FIRST_REQUEST)
    if facts.expected_tokens >= 2 * max(facts.found_tokens, _MISS_MIN_TOKENS):
        reusable = min(facts.expected_tokens, facts.tokens - 1)
        return _judge_loss(facts._replace(place="taken"), first._replace(reusable=reusable), None)
    return first


def _judge_change(
    facts: CacheFacts, told: CacheFinding, shared_bytes: int, known_bytes: int
) -> CacheFinding:
    """Judge a prompt that the client changed: the tokens that it cost, and other losses."""
    total_bytes = max(1, facts.prompt.outline.size_bytes)
    estimate = round(shared_bytes * facts.tokens / total_bytes)
    distance_max = max(_SAME_PLACE_TOKENS, _SAME_PLACE_SHARE * estimate)
    is_same_place = facts.found_tokens > 0 and abs(estimate - facts.found_tokens) <= distance_max
    is_exact = facts.kind == "any" and is_same_place
    if facts.place == "slot" and facts.kind == "any" and told.role == "tools":
        is_exact = True  # a template may put tools elsewhere than at the start
    shared = facts.found_tokens if is_exact else max(estimate, facts.found_tokens)
    known = round(known_bytes * facts.tokens / total_bytes)
    reusable = min(max(known, shared), facts.tokens - 1)
    token = min(shared + 1, facts.tokens)
    told = told._replace(reusable=reusable, shared=shared, token=token, is_about=not is_exact)
    if not _is_miss(reusable, facts):
        return told._replace(cause=Cause.ALL_FOUND)
    is_seen = facts.place != "unknown" or facts.kind != "any"
    if is_seen and shared - facts.found_tokens > reusable - shared:
        return _judge_loss(facts, told, shared)
    return told


def _judge_loss(facts: CacheFacts, told: CacheFinding, shared: int | None) -> CacheFinding:
    told = told._replace(shared=shared)
    if not _is_miss(told.reusable, facts):
        return told._replace(cause=told.cause if told.cause in PLAIN else Cause.ALL_FOUND)
    cause = _cause_of_loss(facts, is_extension=shared == told.reusable)
    return told._replace(cause=cause)


def _cause_of_loss(facts: CacheFacts, *, is_extension: bool) -> Cause:
    if facts.is_cache_off:
        return Cause.CACHE_OFF
    if facts.place in _LOST_WITH:
        return _LOST_WITH[facts.place]
    if facts.place == "taken" and (is_extension or facts.kind == "any"):
        return Cause.SLOT_EVICTED
    return _LIMITED_BY[facts.kind]


def _is_miss(reusable: int, facts: CacheFacts) -> bool:
    least = max(_MISS_MIN_TOKENS, _MISS_MIN_SHARE * facts.tokens)
    return reusable - facts.found_tokens > least


# Hashes in all: 8 bytes each, 2 MB.
_HASHES_MAX: Final = 256 * 1024
_CONVERSATIONS_MAX: Final = 1024
_CLIENTS_MAX: Final = 256
_LATEST_OF_CLIENT: Final = 4
# A conversation is found again by its last long parts; a new prompt is searched from its end.
_LANDMARKS: Final = 3
_LOOKED_AT_MAX: Final = 64
# A shorter part ("go on") occurs in many conversations.
_LANDMARK_MIN_BYTES: Final = 24
_CANDIDATES_MAX: Final = 4
_KNOWN_MIN_SHARE: Final = 0.5
_SHARED_MIN_BLOCKS: Final = 2


@dataclass(slots=True, eq=False)
class RecentPrompt:
    request_id: str
    client: int
    run: Run
    ended_at_s: float
    prompt_tokens: int  # Tokens without the answer, counted by the engine.
    blocks: Sequence[int]  # As in `Prompt`.
    outline: Outline  # The parts of the prompt and of the answer.
    landmarks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.blocks) + 2 * len(self.outline.hashes) + 1


@dataclass(slots=True)
class _Client:
    """The latest conversations of a client with a model, and the cause of its latest misses."""

    latest: deque[Conversation] = field(default_factory=lambda: deque(maxlen=_LATEST_OF_CLIENT))
    cause: str | None = None
    repeated: int = 0
    # Of the latest part that the client changed, by its role: its hash, and those of its values.
    values: dict[str, tuple[int, ValueHashes]] = field(default_factory=dict)


class RecentPrompts:
    def __init__(self, hashes_max: int = _HASHES_MAX) -> None:
        self._hashes_max = hashes_max
        self._prompts: OrderedDict[Conversation, RecentPrompt] = OrderedDict()
        self._landmarks: dict[int, Conversation] = {}
        self._clients: OrderedDict[int, _Client] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def find(
        self, client: int, prompt: Prompt, conversation: Conversation | None
    ) -> tuple[RecentPrompt | None, bool]:
        """Return the prompt before, and whether it belongs to the same conversation.

        `conversation`: the conversation that the prompt is known to continue, if any.
        """
        if conversation and (known := self._prompts.get(conversation)):
            return known, True
        if recent := self._find_by_landmarks(client, prompt.outline):
            return recent, True
        return self._find_same_beginning(client, prompt), False

    def add(self, conversation: Conversation, recent: RecentPrompt) -> None:
        self.forget(conversation)
        self._prompts[conversation] = recent
        self._size += recent.size
        for landmark in recent.landmarks:
            self._landmarks[landmark] = conversation
        latest = self._client(recent.client).latest
        if conversation not in latest:
            latest.append(conversation)
        while self._size > self._hashes_max or len(self._prompts) > _CONVERSATIONS_MAX:
            self.forget(next(iter(self._prompts)))

    def own_blocks(self, client: int, prompt: Prompt) -> int:
        """Return how many blocks of a prompt the client's own recent prompts share with it."""
        own = (recent.blocks for recent in self._prompts.values() if recent.client == client)
        return max((shared_blocks(blocks, prompt.blocks) for blocks in own), default=0)

    def find_conversation(self, request_id: str | None, number: int | None) -> Conversation | None:
        """Return the conversation whose latest request has this id, or which has this number."""
        for conversation, recent in self._prompts.items():
            if recent.request_id == request_id or conversation.number == number:
                return conversation
        return None

    def count_repetitions(self, client: int, cause: str | None) -> int:
        """Count a miss; return how many successive requests of the client had the same cause.

        `cause` is None for a request that ends a repetition.
        """
        found = self._client(client)
        found.repeated = found.repeated + 1 if cause and found.cause == cause else 1
        found.cause = cause
        return found.repeated

    def with_changes(
        self,
        found: CacheFinding,
        earlier: RecentPrompt | None,
        prompt: Prompt,
        kind: EndpointKind,
        members: Mapping[str, Any],
    ) -> CacheFinding:
        """Add the client's change in the first part of a prompt that differs, if it had a cost."""
        part = _first_difference(earlier.outline, prompt.outline) if earlier else None
        if earlier is None or part is None or found.role == "assistant":
            return found
        role, known = prompt.outline.role(part), self._client(earlier.client).values
        same_bytes = BLOCK_BYTES * shared_blocks(earlier.blocks, prompt.blocks)
        same_bytes = max(same_bytes, sum(prompt.outline.sizes_bytes[:part]))
        part_hash, before = known.get(role, (0, None))
        if part_hash != earlier.outline.hashes[part]:  # the values of another prompt
            before = None
        changes, values = find_changes(kind, members, prompt.outline, part, same_bytes, before)
        known[role] = prompt.outline.hashes[part], values
        return found._replace(changes=changes)

    def _client(self, client: int) -> _Client:
        found = self._clients.get(client)
        if found is None:
            found = self._clients[client] = _Client()
            if len(self._clients) > _CLIENTS_MAX:
                self._clients.popitem(last=False)
        else:
            self._clients.move_to_end(client)
        return found

    def forget(self, conversation: Conversation) -> None:
        if (before := self._prompts.pop(conversation, None)) is None:
            return
        self._size -= before.size
        for landmark in before.landmarks:
            if self._landmarks.get(landmark) is conversation:
                del self._landmarks[landmark]

    def _find_by_landmarks(self, client: int, outline: Outline) -> RecentPrompt | None:
        """Return the prompt with the most known messages before the last; at least half of them."""
        keys = _landmarks(client, outline, _LOOKED_AT_MAX)
        found = dict.fromkeys(filter(None, map(self._landmarks.get, keys)))
        candidates = [
            self._prompts[conversation] for conversation in islice(found, _CANDIDATES_MAX)
        ]
        shares = [(_known_share(candidate.outline, outline), candidate) for candidate in candidates]
        share, best = max(shares, key=itemgetter(0), default=(0.0, None))
        return best if share >= _KNOWN_MIN_SHARE else None

    def _find_same_beginning(self, client: int, prompt: Prompt) -> RecentPrompt | None:
        """Return the client's prompt with the longest shared beginning; the latest of equals."""
        best, most = None, _SHARED_MIN_BLOCKS - 1
        known = self._clients.get(client)
        for conversation in reversed(known.latest) if known else ():
            if recent := self._prompts.get(conversation):
                shared = shared_blocks(recent.blocks, prompt.blocks)
                if shared > most:
                    best, most = recent, shared
        return best


def client_hash(model: str, client: str) -> int:
    return xxh3_64_intdigest(f"{model}\0{client}".encode())


def recent_prompt(
    request_id: str,
    run: Run,
    prompt: Prompt,
    reply: Mapping[str, Any] | None,
    figures: tuple[float, int],
    client: int,
) -> RecentPrompt:
    """Return a prompt's record with its answer; `figures` are its end and its tokens."""
    outline = _add_answer(prompt.outline, list(answer_parts(reply)) if reply else [])
    landmarks = tuple(_landmarks(client, outline, _LANDMARKS))
    blocks = array("Q", prompt.blocks)
    return RecentPrompt(request_id, client, run, *figures, blocks, outline, landmarks)


def _add_answer(outline: Outline, answer: Sequence[bytes]) -> Outline:
    number = outline.messages[-1] + 1 if outline.messages else 0
    return Outline(
        array("Q", (*outline.hashes, *part_hashes(answer))),
        array("L", (*outline.sizes_bytes, *map(len, answer))),
        array("l", (*outline.messages, *[number] * len(answer))),
        outline.labels + b"a" * len(answer),
    )


def _landmarks(client: int, outline: Outline, most: int) -> Iterator[int]:
    """Yield the keys of the last parts that distinguish a conversation, the last first."""
    found = 0
    for at in range(len(outline.hashes) - 1, -1, -1):
        is_long = outline.sizes_bytes[at] >= _LANDMARK_MIN_BYTES
        if is_long and not _is_common(outline, at):
            yield outline.hashes[at] ^ client
            found += 1
            if found == most:
                return


def _is_common(outline: Outline, part: int) -> bool:
    return bool(outline.labels) and outline.labels[part] in COMMON


def _known_share(earlier: Outline, outline: Outline) -> float:
    """Return the share by size of a prompt's messages before the last that `earlier` has."""
    known, parts = set(earlier.hashes), range(len(outline.hashes))
    own = [at for at in parts if not _is_common(outline, at)]
    looked_at = own[:-1] or own
    sizes_bytes = outline.sizes_bytes
    total_bytes = sum(sizes_bytes[at] for at in looked_at)
    known_bytes = sum(sizes_bytes[at] for at in looked_at if outline.hashes[at] in known)
    return known_bytes / max(1, total_bytes)
