"""The latest prompt of each recent conversation, as hashes, to tell why the next was not cached.

A conversation is found by the hashes of its turns (`conversations`). A client that changes its
system prompt or its tools, or drops old messages, seems to begin another one: it is found by its
last messages, which the next request repeats, or else by the client's latest prompts that begin the
same way. Bounded: the conversations used least recently go first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from operator import itemgetter
from typing import Final

from xxhash import xxh3_64_intdigest

from proxy.prompt_cache.conversations import Conversation
from proxy.prompt_cache.outline import COMMON, Hashes, Outline, shared_blocks
from proxy.prompt_cache.prompt import Prompt
from proxy.prompt_cache.runs import Run

# Hashes in all: 8 bytes each, 2 MB.
_HASHES_MAX: Final = 256 * 1024
_CONVERSATIONS_MAX: Final = 1024
_CLIENTS_MAX: Final = 256
_LATEST_OF_CLIENT: Final = 4
# By its last parts a conversation is found again; a new prompt is looked through from its end.
_LANDMARKS: Final = 3
_LOOKED_AT_MAX: Final = 64
# A shorter part ("go on") is that of many conversations.
_LANDMARK_MIN_BYTES: Final = 24
_CANDIDATES_MAX: Final = 4
_KNOWN_MIN_SHARE: Final = 0.5
_SHARED_MIN_BLOCKS: Final = 2


@dataclass(slots=True, eq=False)
class RecentPrompt:
    """A prompt and the answer to it.

    Attributes:
        client: As of `client_hash`.
        run: The process that computed it.
        ended_at_s: Monotonic.
        prompt_tokens: As the engine counted them, without the answer.
        hashes: The outline includes the answer.
    """

    request_id: str
    client: int
    run: Run
    ended_at_s: float
    prompt_tokens: int
    hashes: Hashes
    landmarks: tuple[int, ...]

    @property
    def size(self) -> int:
        """Hashes, at least 1."""
        return len(self.hashes.blocks) + 2 * len(self.hashes.outline.hashes) + 1


@dataclass(slots=True)
class _Client:
    """The latest conversations of a client with a model, and the cause of its latest misses."""

    latest: deque[Conversation] = field(default_factory=lambda: deque(maxlen=_LATEST_OF_CLIENT))
    cause: str | None = None
    repeated: int = 0


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
        """Return the prompt before, and whether it is of the same conversation.

        `conversation` is the one that the prompt is known to continue, if any.
        """
        if conversation and (known := self._prompts.get(conversation)):
            return known, True
        if recent := self._by_landmarks(client, prompt.outline):
            return recent, True
        return self._with_same_beginning(client, prompt), False

    def add(
        self,
        client: int,
        conversation: Conversation,
        recent: RecentPrompt,
    ) -> None:
        """Note the latest prompt of a conversation, in place of the one before."""
        self._remove(conversation)
        self._prompts[conversation] = recent
        self._size += recent.size
        for one in recent.landmarks:
            self._landmarks[one] = conversation
        latest = self._client(client).latest
        if conversation not in latest:
            latest.append(conversation)
        while self._size > self._hashes_max or len(self._prompts) > _CONVERSATIONS_MAX:
            self._remove(next(iter(self._prompts)))

    def own_blocks(self, client: int, prompt: Prompt) -> int:
        """Return how many blocks of a prompt a client's own recent prompts begin with."""
        own = (recent.hashes.blocks for recent in self._prompts.values() if recent.client == client)
        return max((shared_blocks(blocks, prompt.blocks) for blocks in own), default=0)

    def conversation_of(self, request_id: str) -> Conversation | None:
        """Return the conversation whose latest request this was."""
        found = (one for one, recent in self._prompts.items() if recent.request_id == request_id)
        return next(found, None)

    def numbered(self, number: int) -> Conversation | None:
        """Return the conversation of a number."""
        return next((one for one in self._prompts if one.number == number), None)

    def forget(self, conversation: Conversation) -> None:
        self._remove(conversation)

    def repeated(self, client: int, cause: str) -> int:
        """Count how many requests of a client, one after the other, had the same cause."""
        found = self._client(client)
        found.repeated = found.repeated + 1 if found.cause == cause else 1
        found.cause = cause
        return found.repeated

    def ends_repetition(self, client: int) -> None:
        self._client(client).cause = None

    def _client(self, client: int) -> _Client:
        found = self._clients.get(client)
        if found is None:
            found = self._clients[client] = _Client()
            if len(self._clients) > _CLIENTS_MAX:
                self._clients.popitem(last=False)
        else:
            self._clients.move_to_end(client)
        return found

    def _remove(self, conversation: Conversation) -> None:
        if (before := self._prompts.pop(conversation, None)) is None:
            return
        self._size -= before.size
        for one in before.landmarks:
            if self._landmarks.get(one) is conversation:
                del self._landmarks[one]

    def _by_landmarks(self, client: int, outline: Outline) -> RecentPrompt | None:
        """Return the prompt that has most of the messages before the last, and at least half."""
        keys = _landmarks(client, outline, _LOOKED_AT_MAX)
        found = dict.fromkeys(filter(None, map(self._landmarks.get, keys)))
        candidates = [self._prompts[one] for one in islice(found, _CANDIDATES_MAX)]
        shares = [(_known_share(one.hashes.outline, outline), one) for one in candidates]
        share, best = max(shares, key=itemgetter(0), default=(0.0, None))
        return best if share >= _KNOWN_MIN_SHARE else None

    def _with_same_beginning(self, client: int, prompt: Prompt) -> RecentPrompt | None:
        """Return the client's prompt with the longest beginning in common; the latest of equals."""
        best, most = None, _SHARED_MIN_BLOCKS - 1
        known = self._clients.get(client)
        for conversation in reversed(known.latest) if known else ():
            if recent := self._prompts.get(conversation):
                shared = shared_blocks(recent.hashes.blocks, prompt.blocks)
                if shared > most:
                    best, most = recent, shared
        return best


def client_hash(model: str, client: str) -> int:
    return xxh3_64_intdigest(f"{model}\0{client}".encode())


def recent_prompt(
    request_id: str,
    run: Run,
    prompt: Prompt,
    answer: Iterable[tuple[int, int]],
    figures: tuple[float, int],
    client: int,
) -> RecentPrompt:
    """Return what is kept of a prompt; `answer` has hash and size of each part of the answer."""
    outline = _with_answer(prompt.outline, answer)
    ended_at_s, tokens = figures
    hashes = Hashes(outline, array("Q", prompt.blocks))
    landmarks = tuple(_landmarks(client, outline, _LANDMARKS))
    return RecentPrompt(request_id, client, run, ended_at_s, tokens, hashes, landmarks)


def _with_answer(outline: Outline, answer: Iterable[tuple[int, int]]) -> Outline:
    hashes, sizes_bytes = array("Q", outline.hashes), array("L", outline.sizes_bytes)
    messages, labels = array("l", outline.messages), outline.labels
    number = messages[-1] + 1 if messages else 0
    for part, size_bytes in answer:
        hashes.append(part)
        sizes_bytes.append(size_bytes)
        messages.append(number)
        labels += b"a"
    return Outline(hashes, sizes_bytes, messages, labels)


def _landmarks(client: int, outline: Outline, most: int) -> Iterator[int]:
    """Return the keys of the last parts that tell a conversation from others, the last first."""
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
    """Return what share of a prompt's messages before the last one another has, 0 to 1, by size."""
    known, parts = set(earlier.hashes), range(len(outline.hashes))
    own = [at for at in parts if not _is_common(outline, at)]
    looked_at = own[:-1] or own
    sizes_bytes = outline.sizes_bytes
    total_bytes = sum(sizes_bytes[at] for at in looked_at)
    known_bytes = sum(sizes_bytes[at] for at in looked_at if outline.hashes[at] in known)
    return known_bytes / max(1, total_bytes)
