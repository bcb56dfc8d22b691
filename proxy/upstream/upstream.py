"""An instance and its address. A model on another machine is an instance of a node."""

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
        prefix: Before every path: empty or `/something`.
        tls: The context of connections where `is_tls`; None: one that trusts the system's CAs.
        is_spare: Whether it gets new conversations only when no other slot is free.
        variants: Names of those that the node has of it.
        weight: Its share of requests as a multiple of an average instance's; None: by its speed.
        hostname: The name in its certificate; empty: the host of the instance.
        takes_keep_alive: Whether it is another llama-corral, which knows the member `keep_alive`.
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
        socket: Path of its unix socket; None: `host` and `port`.
        api_key: Empty if it needs none.
        aliases: Other names of the model.
        can_name_slots: Whether a request may name a slot: the engine does not match prompts, and
            each slot has its own cache.
        is_speculative: Whether it drafts tokens.
        reports_exit: Whether `Router.note_end` reports how its process ended.
        gpu_layers: Layers on a GPU, the output among them; 0 where that is not known.
        node: None for an instance of this machine.
        trial_share: Share of new conversations that it gets because it is on trial; 0 if it is not.
        resumable_prompts: Of a recurrent model, whose state cannot be cut back: from how many of a
            conversation's latest prompts it can go on; 0 for others, which go on from any prefix.
        batch_tokens: The most tokens that it computes in one pass; llama-server's default where
            that is not known.
        has_window: Whether it keeps only a sliding window of a conversation: it goes on only from
            the end of what it holds.
        prefer_pure_decode: Whether its running streams come before the first token of others: it
            computes one prompt at a time while it decodes.
        cache_key: Which slot files it can restore: those with the same; empty: none.
        token_bytes: Of a token in its KV cache; 0 where that is not known.
        state_bytes: Of the recurrent state of one sequence; 0 without any.
        reuses_vectors: Whether it makes a vector from what its slot holds of the text already: with
            the pooling `last`, and a KV cache.
        host_cache_bytes: What it keeps in main memory of prompts that are in no slot (`cache-ram`);
            0: nothing, infinity: no limit.
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
        """The value of Host."""
        if self.socket:
            return _UNIX_AUTHORITY
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
