"""Upstreams: instances and their addresses. A model on another machine is an instance of a node."""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

# llama-server's default. Source: common/common.h of llama.cpp, `n_batch`.
BATCH_TOKENS: Final = 2048
# The engine requires a Host, also over a unix socket.
_UNIX_AUTHORITY = "localhost"


@dataclass(frozen=True, slots=True)
class Node:
    """A model on another machine.

    Attributes:
        model: The node's id of the model.
        prefix: Prefix of every path: empty or `/something`.
        tls: The context for connections with `is_tls`; None: one that trusts the system's CAs.
        is_spare: Whether it gets new conversations only when no other slot is free.
        variants: Names of the model's variants that the node has.
        weight: Its share of requests as a multiple of an average instance's; None: by its speed.
        hostname: The name in its certificate; empty: the host of the instance.
        takes_keep_alive: Whether it is a llama-corral, which knows the member `keep_alive`.
    """

    name: str
    model: str
    prefix: str = ""
    is_tls: bool = False
    is_spare: bool = True
    weight: float | None = None
    variants: tuple[str, ...] = ()
    tls: Callable[[], ssl.SSLContext] | None = field(default=None, compare=False, repr=False)
    hostname: str = ""
    takes_keep_alive: bool = False


@dataclass(frozen=True, slots=True)
class Upstream:
    """One instance.

    Attributes:
        slots: Concurrent sequences, at least 1.
        socket: Path of its unix socket; None: it listens on `host` and `port`.
        api_key: Empty if it needs none.
        aliases: Other names of the model.
        can_name_slots: Whether a request may name a slot: the engine does not match prompts, and
            each slot has its own cache.
        is_speculative: Whether it drafts tokens.
        reports_exit: Whether the end of its process is reported (`Router.note_end`).
        gpu_layers: Layers on a GPU, the output included; 0 if unknown.
        node: None for an instance of this machine.
        trial_share: Share of new conversations that it gets while it is on trial; otherwise 0.
        resumable_prompts: For a recurrent model, whose state cannot be cut back: the number of a
            conversation's latest prompts that it can continue. 0 for others: they continue any
            prefix.
        batch_tokens: The most tokens in one pass; llama-server's default if unknown.
        has_window: Whether it keeps only a sliding window of a conversation, so that it can
            continue only from the end of its content.
        prefer_pure_decode: Whether running streams have priority over the first token of others: it
            computes one prompt at a time while it decodes.
        cache_key: It can restore slot files with the same key; empty: none.
        token_bytes: Bytes of a token in its KV cache; 0 if unknown.
        state_bytes: Bytes of the recurrent state of one sequence; 0 without one.
        reuses_vectors: Whether it reuses the text in its slot for a vector: with the pooling
            `last`, and a KV cache.
        host_cache_bytes: Limit of its host cache, for prompts in no slot (`cache-ram`); 0: no
            cache, infinity: no limit.
    """

    name: str
    model: str
    slots: int
    socket: str | None
    host: str
    port: int
    api_key: str = field(repr=False)
    aliases: tuple[str, ...] = ()
    can_name_slots: bool = False
    is_speculative: bool = False
    reports_exit: bool = False
    gpu_layers: int = 0
    node: Node | None = None
    trial_share: float = 0.0
    resumable_prompts: int = 0
    has_window: bool = False
    batch_tokens: int = BATCH_TOKENS
    prefer_pure_decode: bool = False
    cache_key: str = ""
    token_bytes: float = 0.0
    state_bytes: int = 0
    host_cache_bytes: float = 0.0
    reuses_vectors: bool = False

    @property
    def is_on_trial(self) -> bool:
        return self.trial_share > 0

    @property
    def prefix(self) -> str:
        return self.node.prefix if self.node else ""

    @property
    def authority(self) -> str:
        if self.socket:
            return _UNIX_AUTHORITY
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
