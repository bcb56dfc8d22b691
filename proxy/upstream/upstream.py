"""Upstreams: instances, their addresses, the timings of their responses, and their speeds.

A model on another machine is an instance of a node. Speeds are running averages of timings. A pass
over eight sequences takes longer than a pass over one, and a faster instance gets more of them. So
`DecodeLatency` keeps an average for each level, a range of numbers of sequences with similar
latency, and instances are compared only at a level that both have.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

# The engine requires a Host, also over a unix socket.
_UNIX_AUTHORITY = "localhost"


@dataclass(frozen=True, slots=True)
class Node:
    """A model on another machine."""

    name: str
    model: str  # The node's id of the model.
    prefix: str = ""  # Prefix of every path: empty or `/something`.
    is_tls: bool = False
    is_spare: bool = True  # Whether it gets new conversations only when no other slot is free.
    # Its share of requests as a multiple of an average instance's; None: by its speed.
    weight: float | None = None
    variants: tuple[str, ...] = ()  # Names of the model's variants that the node has.
    # The context for connections with `is_tls`; None: a context that trusts the system's CAs.
    tls: Callable[[], ssl.SSLContext] | None = field(default=None, compare=False, repr=False)
    hostname: str = ""  # The name in its certificate; empty: the host of the instance.
    process: str = ""  # The random word of its process; empty if it is no llama-corral.

    @property
    def takes_keep_alive(self) -> bool:
        """Whether it knows the member `keep_alive`, as each llama-corral does."""
        return bool(self.process)


@dataclass(frozen=True, slots=True)
class Upstream:
    name: str
    model: str
    slots: int  # Concurrent sequences, at least 1.
    socket: str | None  # Path of its unix socket; None: it listens on `host` and `port`.
    host: str
    port: int
    api_key: str = field(repr=False)  # Empty if it needs none.
    aliases: tuple[str, ...] = ()  # Other names of the model.
    # Whether a request may name a slot: the engine does not match prompts, and each slot has its
    # own cache.
    can_name_slots: bool = False
    is_speculative: bool = False  # Whether it drafts tokens.
    reports_exit: bool = False  # Whether the end of its process is reported (`Router.note_end`).
    gpu_layers: int = 0  # Layers on a GPU, the output included; 0 if unknown.
    node: Node | None = None  # None for an instance of this machine.
    # Share of new conversations that it gets while it is on trial; otherwise 0.
    trial_share: float = 0.0
    # For a recurrent model, whose state cannot be cut back: the number of a conversation's latest
    # prompts that it can continue. 0 for others: they continue any prefix.
    resumable_prompts: int = 0
    # Tokens of the sliding window that some layers keep of a conversation, so that it can continue
    # only from the end of its content; 0 if they keep all of it.
    window_tokens: int = 0
    micro_batch_tokens: int = 0  # Prompt tokens that it computes at a time; 0 if unknown.
    # Whether running streams have priority over the first token of others: it computes one prompt
    # at a time while it decodes.
    prefer_pure_decode: bool = False
    cache_key: str = ""  # It can restore slot files with the same key; empty: none.
    token_bytes: float = 0.0  # Bytes of a token in its KV cache; 0 if unknown.
    # Bytes of a sequence beside its tokens: its recurrent state, and its sliding window.
    state_bytes: int = 0
    # Limit of its host cache, for prompts in no slot (`cache-ram`); 0: no cache, infinity: no
    # limit.
    host_cache_bytes: float = 0.0
    # Whether it reuses the text in its slot for a vector: with the pooling `last`, and a KV cache.
    reuses_vectors: bool = False
    # The lines of a request's header that are the same for each request.
    own_fields: tuple[str, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        authority = f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
        fields = [
            f"Host: {_UNIX_AUTHORITY if self.socket else authority}",
            "Accept-Encoding: identity",
            "Connection: close",
        ]
        if self.api_key:
            fields.append(f"Authorization: Bearer {self.api_key}")
        object.__setattr__(self, "own_fields", tuple(fields))  # as all others, it is frozen

    @property
    def is_all_or_nothing(self) -> bool:
        """Whether it continues only from the end of a slot, or from a checkpoint."""
        return bool(self.resumable_prompts or self.window_tokens)

    @property
    def saves_beginnings(self) -> bool:
        """Whether it can save a part of a prompt, from which others continue."""
        return bool(self.cache_key) and self.can_name_slots and not self.prefer_pure_decode

    @property
    def is_on_trial(self) -> bool:
        return self.trial_share > 0


# Weight of the newest value: the last five make up most of the average.
_NEWEST: Final = 0.3
_NUMBERS: Final = {int, float}
_NOT_NEGATIVE: Final = (0.0).__le__
_NAMES: Final = (
    "cache_n",
    "prompt_n",
    "prompt_ms",
    "predicted_n",
    "predicted_ms",
    "draft_n",
    "draft_n_accepted",
)
_ZEROS: Final = (0,) * len(_NAMES)


# Not frozen, as `Rates`: setting a frozen attribute takes ten times as long.
@dataclass(slots=True)
class Timings:
    """The `timings` of a response; `prompt_tokens` excludes the cached tokens.

    Source: llama-server, builds 10434 and 11434.
    """

    cached_tokens: int
    prompt_tokens: int
    prompt_ms: float
    decoded_tokens: int
    decode_ms: float
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @classmethod
    def read(cls, timings: object) -> Timings | None:
        """Parse the member `timings`; None if it is invalid."""
        if not isinstance(timings, dict):
            return None
        figures = [*map(timings.get, _NAMES, _ZEROS)]
        if not {*map(type, figures)} <= _NUMBERS or not all(map(_NOT_NEGATIVE, figures)):
            return None
        cached, prompt, prompt_ms, decoded, decode_ms, drafted, accepted = figures
        return cls(
            int(cached),
            int(prompt),
            float(prompt_ms),
            int(decoded),
            float(decode_ms),
            int(drafted),
            int(accepted),
        )

    def with_chunks(self, chunked: Timings) -> Timings:
        """Count tokens of earlier requests' chunks, found in the cache, as computed."""
        computed = min(chunked.prompt_tokens, self.cached_tokens)
        return replace(
            self,
            cached_tokens=self.cached_tokens - computed,
            prompt_tokens=self.prompt_tokens + computed,
            prompt_ms=self.prompt_ms + chunked.prompt_ms,
        )

    def with_discarded(self, discarded: Timings) -> Timings:
        """Add the tokens that a discarded earlier response to the same prompt generated."""
        return self.plus(replace(discarded, cached_tokens=0, prompt_tokens=0, prompt_ms=0.0))

    def continuing(self, before: Timings | None) -> Timings:
        """Return the timings of an answer whose first part has the timings `before`.

        The prompt of the rest contains that part; the first prompt counts. Of a part without a
        token, only that it has computed a part of the prompt.
        """
        if before is None:
            return self
        if not before.decoded_tokens:
            return self.with_chunks(before)
        whole = self.plus(before)
        prompt = before.cached_tokens, before.prompt_tokens, before.prompt_ms
        return Timings(
            *prompt,
            whole.decoded_tokens,
            whole.decode_ms,
            whole.drafted_tokens,
            whole.accepted_tokens,
        )

    def plus(self, other: Timings | None) -> Timings:
        """Return the sums; the times may overlap."""
        if other is None:
            return self
        names = Timings.__slots__
        return Timings(*(getattr(self, name) + getattr(other, name) for name in names))


def average(before: float, now: float) -> float:
    return before + _NEWEST * (now - before)


# An average of fewer forward passes is meaningless; each token of a response takes one pass.
MIN_SAMPLES: Final = 100
# Measurements this long before the latest response are outdated.
MEMORY_S: Final = 600.0


class Measurement(NamedTuple):
    """A running average over `samples` forward passes; `at_s` is the time of the latest."""

    ms_per_token: float
    samples: int
    at_s: float

    def after(self, newest: Measurement) -> Measurement:
        if newest.at_s - self.at_s > MEMORY_S:
            return newest
        ms_per_token = average(self.ms_per_token, newest.ms_per_token)
        return Measurement(ms_per_token, self.samples + newest.samples, newest.at_s)


class DecodeLatency(dict[int, Measurement]):
    """Measurements by level: up to 2 sequences, up to 8, up to 32, and so on."""

    @property
    def samples(self) -> int:
        return sum(level.samples for level in self.values())

    @property
    def latest_s(self) -> float:
        return max((level.at_s for level in self.values()), default=0.0)

    def after(self, newest: Measurement, sequences: int) -> DecodeLatency:
        """Return the measurements after one more response, decoded in `sequences` sequences."""
        level = (max(1, sequences) - 1).bit_length() // 2
        before = self.get(level)
        return DecodeLatency({**self, level: before.after(newest) if before else newest})

    def over(self, other: DecodeLatency, since_s: float) -> float | None:
        """Return this latency as a multiple of another, at the level that both measured last.

        None if no level has enough samples of both, or all are older than `since_s`.
        """
        common = [
            (min(mine.at_s, theirs.at_s), mine.ms_per_token / theirs.ms_per_token)
            for level, mine in self.items()
            if (theirs := other.get(level)) and min(mine.samples, theirs.samples) >= MIN_SAMPLES
        ]
        at_s, ratio = max(common, default=(0.0, 1.0))
        return ratio if common and at_s >= since_s else None


UNMEASURED: Final = DecodeLatency()


# Shorter responses measure the time of one batch, not the rate.
_PREFILL_MIN_TOKENS: Final = 16
_DECODE_MIN_TOKENS: Final = 4
# Rates before the first response: rather slow, so that no request leaves a cache due to a guess.
_PREFILL_TPS: Final = 100.0
_DECODE_TPS: Final = 30.0


@dataclass(slots=True)
class Rates:
    """Running averages of one instance, in tokens per second; guesses before the first response."""

    prefill_tps: float = _PREFILL_TPS
    decode_tps: float = _DECODE_TPS  # Rate of one request.
    answers: int = 0  # The number of responses in the averages.
    acceptance: float | None = None  # Share of drafted tokens that were accepted, 0 to 1.
    latency: DecodeLatency = field(default_factory=lambda: UNMEASURED)

    def after(self, timings: Timings, sequences: int = 1, at_s: float = 0.0) -> Rates:
        """Return the averages after one more response, at a monotonic time."""
        prefill_tps, decode_tps, latency = self.prefill_tps, self.decode_tps, self.latency
        if timings.prompt_tokens >= _PREFILL_MIN_TOKENS and timings.prompt_ms > 0:
            prefill_tps = self._mix(prefill_tps, timings.prompt_tokens / timings.prompt_ms * 1000)
        if timings.decoded_tokens >= _DECODE_MIN_TOKENS and timings.decode_ms > 0:
            decode_tps = self._mix(decode_tps, timings.decoded_tokens / timings.decode_ms * 1000)
            ms_per_token = timings.decode_ms / timings.decoded_tokens
            newest = Measurement(ms_per_token, timings.decoded_tokens, at_s)
            latency = latency.after(newest, sequences)
        acceptance = self.acceptance
        if timings.drafted_tokens:
            now = timings.accepted_tokens / timings.drafted_tokens
            acceptance = now if acceptance is None else average(acceptance, now)
        return Rates(prefill_tps, decode_tps, self.answers + 1, acceptance, latency)

    def _mix(self, before: float, now: float) -> float:
        return now if not self.answers else average(before, now)
