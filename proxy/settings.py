"""`[proxy]`: where the proxy listens, and the limits it keeps."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from proxy.batch_config import BatchSettings
from proxy.config.address import Address, host_of, is_loopback, port_of
from proxy.config.types import ExpandedPath, SettingsTable, Text
from proxy.ollama_config import OllamaSettings
from proxy.request_limits.limits import RequestLimits
from proxy.responses_config import StoredResponseSettings
from proxy.tls_config import TlsSettings
from proxy.tracing_config import TracingSettings

Fallbacks = Annotated[tuple[Text, ...], Field(min_length=1, max_length=8)]
Policy = Literal["affinity", "least-busy", "round-robin"]


class ProxySettings(SettingsTable):
    """`[proxy]`: where clients connect, and what they may send."""

    listen: Address = Field(
        "127.0.0.1:8080", description="HOST:PORT that clients connect to; port 0 takes any free one"
    )
    max_body_bytes: int = Field(
        16 * 1024**2,
        ge=1024,
        le=4 * 1024**3,
        description="largest request body, in bytes, decompressed; "
        "raise it for large images or audio",
    )
    max_body_ratio: float = Field(
        100,
        ge=1,
        le=10_000,
        description="largest ratio of a request body's decompressed to its compressed size",
    )
    max_body_values: int = Field(
        500_000,
        ge=1000,
        le=100_000_000,
        description="most values in a JSON request body; "
        "a number or a string counts 1, a member's name 2, a list or an object 8 more",
    )
    max_body_depth: int = Field(
        200,
        ge=8,
        le=250,
        description="levels of nested lists and objects in a JSON request body",
    )
    body_memory_bytes: int = Field(
        256 * 1024**2,
        ge=1024**2,
        le=1024**4,
        description="memory for the bodies of all requests together, in bytes, half of it for one "
        "client; a request that needs more gets 503",
    )
    max_header_total_bytes: int = Field(
        32 * 1024, ge=4096, le=1024**2, description="largest request header, in bytes"
    )
    max_connections: int | None = Field(
        None,
        ge=8,
        le=100_000,
        description="connections of clients at once; unset: as many as the limit of open files "
        "allows, at most 1024",
    )
    connect_timeout_s: float = Field(
        5, gt=0, le=60, description="seconds to wait for an engine to accept a connection"
    )
    upstream_read_timeout_s: float = Field(
        3600,
        gt=0,
        le=86_400,
        description="seconds without a byte of an engine before its response is aborted",
    )
    cancel_timeout_s: float = Field(
        60,
        ge=1,
        le=86_400,
        description="seconds an engine may compute for a request that is over before it is "
        "restarted; raise it where one batch takes longer",
    )
    header_timeout_s: float = Field(
        20, gt=0, le=3600, description="seconds a client may take to send a request's header"
    )
    body_timeout_s: float = Field(
        300, gt=0, le=86_400, description="seconds a client may take to send a request's body"
    )
    client_write_timeout_s: float = Field(
        120,
        ge=1,
        le=86_400,
        description="seconds a client may read nothing before it is disconnected",
    )
    crash_memory_s: float = Field(
        600,
        ge=0,
        le=86_400,
        description="seconds for which a request is rejected after two engines crashed computing "
        "it; 0 for never",
    )
    queue_max: int = Field(
        128,
        ge=0,
        le=100_000,
        description="interactive requests that may wait for one model; more get 429",
    )
    queue_timeout_s: float = Field(
        120,
        ge=0,
        le=86_400,
        description="seconds a request may wait for a slot or for its model to load",
    )
    policy: Policy = Field(
        "affinity",
        description="which engine gets a request: affinity (the one that caches the conversation), "
        "least-busy or round-robin",
    )
    share_caches: Literal["all", "key"] = Field(
        "all",
        description="whose requests may find what a prompt leaves in caches: those of all API "
        "keys, or of its own key (without API keys: all)",
    )
    default_model: Text | None = Field(
        None,
        description="name of the model for requests without one; unset: where there is only one "
        "model, that one",
    )
    fallback: dict[Text, Fallbacks] = Field(
        default_factory=dict,
        max_length=1024,
        description="of models that only nodes have, the models, aliases or variants that answer "
        "their chats, the first that can, while no node serves them",
    )
    load_for_others: Literal["never", "idle"] = Field(
        "never",
        description="whether another llama-corral that has this one as a node may have it load a "
        "model; idle: where memory is free, or held by models unused for ten minutes",
    )
    route_by_speed: bool = Field(
        default=True,
        description="whether an engine that decodes more than twice as fast as another one of its "
        "model gets more of the requests",
    )
    slot_save_pause_max_ms: int = Field(
        200,
        ge=0,
        le=60_000,
        description="longest expected pause of running streams while a conversation of their "
        "engine is saved to disk, in ms; 0: nothing is saved while they run",
    )
    prefix_index_max_blocks: int = Field(
        200_000, ge=1, le=100_000_000, description="blocks of prompts in the prefix index"
    )
    api_keys_file: ExpandedPath | None = Field(
        None, description="TOML file of the accepted API keys; unset: no key is needed"
    )
    allowed_origins: tuple[Text, ...] = Field(
        (),
        description="origins that may send requests, besides the local ones: web pages, browser "
        "extensions (chrome-extension://ID), apps (capacitor://localhost); one * may stand in the "
        "host, as in https://*.example.com",
    )
    allowed_hosts: tuple[Text, ...] = Field(
        (),
        description="names of this machine accepted in Host, besides localhost, IP addresses and "
        "its hostname (the last two only where listen is not a loopback address)",
    )
    announce: bool = Field(
        default=False,
        description="whether it is announced in the local network by multicast DNS, for the nodes "
        "of other machines; needs a listen that they reach",
    )
    dashboard: bool = Field(
        default=True, description="whether the dashboard is served, at /corral/"
    )
    engine_ui: Address | None = Field(
        None,
        description="HOST:PORT of a second address, which has llama.cpp's own web UI besides all "
        "others; unset: it is not served",
    )
    batch: BatchSettings = BatchSettings()
    limits: RequestLimits = RequestLimits()
    stored_responses: StoredResponseSettings = StoredResponseSettings()
    tls: TlsSettings | None = None
    ollama: OllamaSettings = OllamaSettings()
    tracing: TracingSettings = TracingSettings()

    @model_validator(mode="after")
    def _has_two_addresses(self) -> Self:
        if self.ollama.listen == self.listen and self.port:
            raise ValueError("ollama.listen is listen; set enabled = true under [proxy.ollama]")
        return self

    @model_validator(mode="after")
    def _has_a_ui_address(self) -> Self:
        if self.engine_ui in {self.listen, self.ollama.listen} and self.engine_ui is not None:
            raise ValueError("engine_ui: the address is taken; the web UI needs one of its own")
        return self

    @model_validator(mode="after")
    def _is_reachable(self) -> Self:
        if self.announce and is_loopback(self.host):
            raise ValueError(f"announce: other machines do not reach {self.listen}; set listen")
        return self

    @property
    def host(self) -> str:
        """The address to listen on, an IPv6 one without brackets."""
        return host_of(self.listen)

    @property
    def port(self) -> int:
        """The TCP port to listen on; 0 takes any free one."""
        return port_of(self.listen)
