"""The settings of the proxy: `[proxy]` with its tables, and `[jobs]`.

    [proxy]                    the proxy's addresses and limits
    [proxy.limits]             members of requests; each limit is far above realistic requests
    [proxy.batch]              how batch requests gather
    [proxy.ollama]             which addresses have Ollama's API
    [proxy.stored_responses]   responses that later requests name as `previous_response_id`
    [proxy.tls]                the certificate of the listening address
    [proxy.auth_proxy]         users that a reverse proxy has signed in
    [proxy.tracing]            the collector of traces
    [jobs]                     the limits of files and batches

Requests beyond `[proxy.limits]` crash llama-server or block its single computing thread, and with
it the responses to all other clients. Names and values of `BatchConfig` are those of realizar
0.8.5.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, replace
from typing import Annotated, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from proxy.common.toml_types import (
    Address,
    ExpandedPath,
    SettingsTable,
    Text,
    host_of,
    is_loopback,
    port_of,
)
from proxy.errors import LimitExceeded

_INT32_MAX: Final = 2**31 - 1  # the engine's numbers have 32 bits
_Limit = Annotated[int, Field(ge=1, le=_INT32_MAX)]

# Source: llama-server, build 10434, a tiny model and SmolLM2-135M on one core of a shared machine.
# | request | last that succeeded | first that failed |
# | --- | --- | --- |
# | nested parentheses, grammar or expression | 10 000 | 30 000: SIGSEGV |
# | rules that reference the next one | 30 000 | 100 000: SIGSEGV |
# | alternatives of a grammar, three tokens | 1 000: 0.7 s | 10 000: 9.6 s |
# | parse stacks, two tokens | 513: 0.9 s | 1 025: 3.5 s; 2^18: over 60 s |
# | consecutive optional parts, three tokens | 64: 0.6 s | 100: 4.7 s; 200: over 15 s |
# | consecutive `(a*)*` in a trigger, then `b` | | 20: over 130 s |
# | characters of a trigger's expression, or word | 30 000 | 100 000: SIGSEGV |
# | optional properties of an object | 300: 0.3 s | 1 000: 5.3 s; 2 000: over 15 s |
# | levels of a schema | 1 000: 0.3 s, 0.3 GB | 10 000: SIGSEGV |
# | values of an `enum`, three tokens | 1 000: 0.7 s | 10 000: 5.6 s |
# | `repeat_last_n` with a penalty | 10 000 000: 0.04 GB | 1 000 000 000: 5 GB |
# | `dry_sequence_breakers` | 10: 0.3 s | 100: 2.5 s; 1 000: over 15 s |
# | `n_probs`, 30 tokens | 1 000: 0.3 s more | 10 000: 5.5 s |
# | texts in `logit_bias` | 10 000: 1.3 s | 100 000: 9 s, 1.6 GB |
# Sizes of repetitions (`{1,100000}`, `maxItems`) need no limit: the engine rejects or ignores sizes
# above 2 000. JSON outside of schemas needs none either: `max_body_depth` limits its levels.


class RequestLimits(SettingsTable):
    """`[proxy.limits]`: how much work one request can cause in an engine; more gets 400."""

    grammar_bytes: _Limit = 65_536
    """characters of a grammar"""
    grammar_depth: _Limit = 128
    """nested parentheses in a grammar or a regular expression"""
    grammar_rules: _Limit = 4096
    """rules of a grammar"""
    grammar_alternatives: _Limit = 2000
    """alternatives of a grammar or of a regular expression"""
    grammar_stacks: _Limit = 1000
    """parse states that an engine follows at once, in a grammar or a schema"""
    grammar_optionals: _Limit = 64
    """consecutive optional or repeated parts in a grammar or a regular expression"""
    pattern_bytes: _Limit = 16_384
    """characters of all regular expressions together"""
    schema_values: _Limit = 50_000
    """values in all JSON schemas together"""
    schema_depth: _Limit = 128
    """levels of JSON in a schema"""
    schema_optional: _Limit = 300
    """properties of one object of a schema that are not required"""
    schema_choices: _Limit = 2000
    """entries of one list in a schema, such as enum"""
    triggers: _Limit = 1024
    """grammar triggers, and preserved tokens"""
    trigger_patterns: Annotated[int, Field(ge=0, le=_INT32_MAX)] = 0
    """regular expressions among grammar triggers; some block an engine for minutes"""
    stop: _Limit = 256
    """stop texts"""
    logit_bias: _Limit = 10_000
    """entries of logit_bias"""
    text_chars: _Limit = 4096
    """characters of one such string, trigger or sequence breaker"""
    n_predict: _Limit = _INT32_MAX
    """tokens of a response"""
    last_n: _Limit = 2**20
    """tokens that penalties cover"""
    dry_sequence_breakers: _Limit = 64
    """DRY sequence breakers"""
    samplers: _Limit = 64
    """samplers"""
    lora: _Limit = 64
    """LoRA adapters"""
    prompts: _Limit = 2048
    """prompts of one request"""
    answers: _Limit = 64
    """choices of one request (n)"""
    n_probs: _Limit = 1000
    """tokens whose probabilities are returned at each position"""

    def enforce(self, member: str, unit: str, amount: float, setting: str) -> None:
        """Raise LimitExceeded if a member of the body has more `unit`s than a limit.

        `unit` is empty if `amount` is the member's own value.
        """
        limit: int = getattr(self, setting)
        if amount > limit:
            # A number may have a thousand digits.
            is_short = isinstance(amount, int) and amount < 10**18
            shown = f"{amount:d}" if is_short else f"{amount:.3g}"
            counted = f"has {shown} {unit}" if unit else f"is {shown}"
            raise LimitExceeded(
                f"{member} {counted}, more than {limit}; "
                f"send less, or raise {setting} under [proxy.limits]"
            )


_REQUESTS_MAX = 100_000
_Requests = Annotated[int | None, Field(ge=1, le=_REQUESTS_MAX)]


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """The rules by which batch requests gather."""

    window_ms: int = 50  # Longest wait of the first request for more.
    min_batch: int = 4  # Fewer requests run singly.
    optimal_batch: int = 32  # This many requests do not wait for more.
    max_batch: int = 64  # Most requests of one batch.
    queue_size: int = 1024  # Most waiting requests of a client for one model.
    gpu_threshold: int = 32  # Only reported to clients; llama-server uses its GPU for any batch.

    @classmethod
    def low_latency(cls) -> Self:
        return cls(5, 2, 8, 16, 512, 32)

    @classmethod
    def high_throughput(cls) -> Self:
        return cls(100, 8, 32, 128, 2048, 32)

    def should_process(self, batch_size: int) -> bool:
        """Return whether this many requests begin at once."""
        return batch_size >= self.optimal_batch

    def meets_minimum(self, batch_size: int) -> bool:
        return batch_size >= self.min_batch


class BatchSettings(SettingsTable):
    """`[proxy.batch]`: how requests of priority batch gather."""

    preset: Literal["default", "low_latency", "high_throughput"] = "default"
    """values of the settings below that are unset"""
    window_ms: int | None = Field(None, ge=0, le=60_000)
    """milliseconds that a batch request waits for others; unset: 50, 5 or 100 by the preset"""
    min_batch: _Requests = None
    """fewer requests than this run singly; unset: 4, 2 or 8 by the preset"""
    optimal_batch: _Requests = None
    """this many requests begin at once; unset: 32, 8 or 32 by the preset"""
    max_batch: _Requests = None
    """most requests of one batch; unset: 64, 16 or 128 by the preset"""
    queue_size: _Requests = None
    """batch requests of a client for one model that may wait, and prompts of one request; more get
    429; unset: 1024, 512 or 2048 by the preset"""
    gpu_threshold: _Requests = None
    """batch_threshold of /v1/gpu/status; an engine uses its GPU for batches of any size; unset:
    32"""

    @property
    def config(self) -> BatchConfig:
        presets = {
            "default": BatchConfig,
            "low_latency": BatchConfig.low_latency,
            "high_throughput": BatchConfig.high_throughput,
        }
        names = BatchConfig.__slots__
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return replace(presets[self.preset](), **given)

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        least, most = self.config.min_batch, self.config.max_batch
        if least > most:
            raise ValueError(f"min_batch ({least}) is more than max_batch ({most})")
        return self


class OllamaSettings(SettingsTable):
    """`[proxy.ollama]`: Ollama's API under /api, for clients that know no other API."""

    enabled: bool = False
    """whether the address of the proxy also serves Ollama's API"""
    listen: Address | None = None
    """HOST:PORT of a second address, with Ollama's API and all others; Ollama's own is
    127.0.0.1:11434"""
    manage_models: bool = False
    """whether clients of Ollama's API may download and delete models (/api/pull, /api/delete)"""

    @property
    def is_on(self) -> bool:
        return self.enabled or self.listen is not None


class StoredResponseSettings(SettingsTable):
    """`[proxy.stored_responses]`: conversations of the Responses API that the proxy remembers."""

    enabled: bool = False
    """whether responses are kept in memory for previous_response_id and GET /v1/responses/{id}, for
    the API key that created them"""
    max_count: int = Field(10_000, ge=1, le=10_000_000)
    """most stored responses; the oldest are deleted first"""
    max_bytes: int = Field(64 * 1024**2, ge=1024**2, le=1024**4)
    """memory for stored responses and their requests, in bytes"""
    keep_s: int = Field(86_400, ge=1, le=10 * 365 * 86_400)
    """seconds until a response is deleted"""


class TlsSettings(SettingsTable):
    """`[proxy.tls]`: clients connect by https; TLS 1.2 at least."""

    cert: ExpandedPath
    """PEM file of the certificate, followed by the intermediate certificates; new connections use a
    changed file"""
    key: ExpandedPath
    """PEM file of the certificate's key without a passphrase, readable by this user alone"""
    client_ca: ExpandedPath | None = None
    """PEM file of the CAs that sign client certificates; unset: clients need no certificate"""

    @property
    def files(self) -> tuple[ExpandedPath, ...]:
        return (self.cert, self.key, *([self.client_ca] if self.client_ca else []))


def _network(address: str) -> str:
    if not ipaddress.ip_network(address).prefixlen:
        raise ValueError("all addresses; name those of the proxy")
    return address


_Field = Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,64}$")]


class AuthProxySettings(SettingsTable):
    """`[proxy.auth_proxy]`: users whom a reverse proxy has signed in, such as oauth2-proxy."""

    addresses: Annotated[tuple[Annotated[Text, AfterValidator(_network)], ...], Field(min_length=1)]
    """IP addresses and networks (10.0.0.0/24) of the reverse proxy; a program there can
    be any user, and fields from elsewhere are ignored"""
    user_header: _Field = "X-Forwarded-User"
    """field with the name of the user; the reverse proxy must remove this field from clients'
    requests"""
    groups_header: _Field = "X-Forwarded-Groups"
    """field with the groups of the user, separated by commas; as above"""
    roles: Annotated[dict[Text, Text], Field(min_length=1, max_length=256)]
    """for each group: the entry of api_keys_file with the rights and limits of each of its users;
    for a user in several groups, the first group listed here counts; * means all users"""


def _endpoint(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.port == 0:
        raise ValueError("not the URL of a collector, such as http://127.0.0.1:4318")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError("must be a plain URL; put credentials into OTEL_EXPORTER_OTLP_HEADERS")
    return url


class TracingSettings(SettingsTable):
    """`[proxy.tracing]`: OpenTelemetry, which the extra `otel` installs."""

    endpoint: Annotated[Text, AfterValidator(_endpoint)] | None = None
    """base URL of an OTLP collector that gets a trace of each request, such as
    http://127.0.0.1:4318; unset: OTEL_EXPORTER_OTLP_ENDPOINT, or no traces"""
    service_name: Text | None = Field(None, min_length=1)
    """service.name of the traces; unset: OTEL_SERVICE_NAME, or llama-corral"""
    sample_ratio: float | None = Field(None, ge=0, le=1)
    """share of the requests without a client's trace that get one; unset: OTEL_TRACES_SAMPLER, or
    all"""


class JobSettings(SettingsTable):
    """`[jobs]`: the limits of OpenAI's Batch API.

    Source of the first two and of `keep_files_s`: OpenAI's API reference, files and batches.
    """

    max_file_bytes: int = Field(200 * 1000**2, ge=1024, le=2**40)
    """largest file of requests, in bytes"""
    max_lines: int = Field(50_000, ge=1, le=10_000_000)
    """most lines of a file of requests"""
    max_line_bytes: int = Field(16 * 1024**2, ge=1024, le=2**30)
    """longest line of a file of requests, in bytes"""
    total_bytes: int = Field(8 * 1024**3, ge=1024**2, le=2**50)
    """disk space for all files and results, in bytes; files may take three quarters of it"""
    max_jobs: int = Field(64, ge=1, le=10_000)
    """batches of one API key that have not ended; more get 429"""
    max_in_flight: int = Field(64, ge=1, le=10_000)
    """lines of all batches that one model computes at once"""
    max_attempts: int = Field(5, ge=1, le=100)
    """attempts at a line that fails with 500, 502 or 504 before the failure is its result; waits
    for a slot or a model do not count"""
    keep_files_s: int = Field(30 * 86_400, ge=3600, le=10 * 365 * 86_400)
    """seconds until a file is deleted, results included"""


PromptRule = Literal[
    "freeze:header", "freeze:uuid", "freeze:time", "freeze:date", "freeze:path", "freeze:number",
    "move:header", "move:uuid", "move:time", "move:date", "move:path", "move:number",
    "freeze:block", "move:block", "sort-tools",
]  # fmt: skip
Fallbacks = Annotated[tuple[Text, ...], Field(min_length=1, max_length=8)]
Policy = Literal["affinity", "least-busy", "round-robin"]


class ProxySettings(SettingsTable):
    """`[proxy]`: the address for clients, and limits on their requests."""

    listen: Address = "127.0.0.1:8080"
    """HOST:PORT that clients connect to; port 0 takes any free one"""
    max_body_bytes: int = Field(16 * 1024**2, ge=1024, le=4 * 1024**3)
    """largest request body, in bytes, decompressed; raise it for large images or audio"""
    max_body_ratio: float = Field(100, ge=1, le=10_000)
    """largest ratio of a request body's decompressed to its compressed size"""
    max_body_values: int = Field(500_000, ge=1000, le=100_000_000)
    """most values in a JSON request body; a number or a string counts 1, a member's name 2, a list
    or an object 8 more"""
    max_body_depth: int = Field(200, ge=8, le=250)
    """levels of nested lists and objects in a JSON request body"""
    body_memory_bytes: int = Field(256 * 1024**2, ge=1024**2, le=1024**4)
    """memory for the bodies of all requests together, in bytes, half of it for one client; a
    request that needs more gets 503"""
    max_header_total_bytes: int = Field(32 * 1024, ge=4096, le=1024**2)
    """largest request header, in bytes"""
    max_connections: int | None = Field(None, ge=8, le=100_000)
    """connections of clients at once; unset: as many as the limit of open files allows, at most
    1024"""
    connect_timeout_s: float = Field(5, gt=0, le=60)
    """seconds to wait for an engine to accept a connection"""
    upstream_read_timeout_s: float = Field(3600, gt=0, le=86_400)
    """seconds without a byte from an engine before its response is aborted"""
    cancel_timeout_s: float = Field(60, ge=1, le=86_400)
    """seconds an engine may continue to compute for a request that has ended before the engine is
    restarted; raise it if one batch takes longer"""
    header_timeout_s: float = Field(20, gt=0, le=3600)
    """seconds a client may take to send a request's header"""
    body_timeout_s: float = Field(300, gt=0, le=86_400)
    """seconds a client may take to send a request's body"""
    client_write_timeout_s: float = Field(120, ge=1, le=86_400)
    """seconds a client may read nothing before it is disconnected"""
    crash_memory_s: float = Field(600, ge=0, le=86_400)
    """seconds for which a request is rejected after two engines crashed computing it; 0 for
    never"""
    queue_max: int = Field(128, ge=0, le=100_000)
    """interactive requests that may wait for one model; more get 429"""
    queue_timeout_s: float = Field(120, ge=0, le=86_400)
    """seconds a request may wait for a slot or for its model to load"""
    policy: Policy = "affinity"
    """how the engine for a request is chosen: affinity (the engine that caches the conversation),
    least-busy or round-robin"""
    share_caches: Literal["all", "key"] = "all"
    """which requests may use a cached prompt: those of all API keys, or only those of the same key
    (without API keys: all)"""
    default_model: Text | None = None
    """name of the model for requests without one; unset: the only model, if there is just one"""
    fallback: dict[Text, Fallbacks] = Field(default_factory=dict, max_length=1024)
    """for each model that only nodes have: the models, aliases or variants that answer its chats
    while no node serves it; the first available one answers"""
    prompt_rules: dict[Text, tuple[PromptRule, ...]] = Field(default_factory=dict, max_length=1024)
    """for each client (an API key, an address, or the program named first in its User-Agent):
    changes to its system prompts and tools, so that caches can reuse more of them; freeze:KIND
    keeps the values of a session's first request, move:KIND moves lines with such values to the
    end, the kind block covers elements such as <env>, sort-tools sorts tools by name"""
    load_for_others: Literal["never", "idle"] = "never"
    """whether another llama-corral that uses this one as a node may ask it to load a model; idle:
    if memory is free, or held by models unused for ten minutes"""
    route_by_speed: bool = True
    """whether an engine that decodes more than twice as fast as another one of its model gets more
    of the requests"""
    slot_save_pause_max_ms: int = Field(200, ge=0, le=60_000)
    """longest expected pause of running streams while a conversation of their engine is saved to
    disk, in ms; 0: nothing is saved while they run"""
    ahead_share: float = Field(0.2, ge=0, le=1)
    """share of its time that an idle engine may spend on computing the next turns of conversations
    before they arrive; 0: never"""
    ahead_on_battery: bool = False
    """whether engines also compute next turns while the machine runs on its battery"""
    slot_hold_max_s: float = Field(20, ge=0, le=300)
    """longest time, in seconds, for which the slot of a conversation that has called tools is held
    for its next turn while other requests wait; 0: never"""
    prefix_index_max_blocks: int = Field(200_000, ge=1, le=100_000_000)
    """blocks of prompts in the prefix index"""
    api_keys_file: ExpandedPath | None = None
    """TOML file of the accepted API keys; unset: no key is needed"""
    allowed_origins: tuple[Text, ...] = ()
    """origins that may send requests, besides the local ones: web pages, browser extensions
    (chrome-extension://ID), apps (capacitor://localhost); one * may stand in the host, as in
    https://*.example.com"""
    allowed_hosts: tuple[Text, ...] = ()
    """names of this machine accepted in Host, besides localhost, IP addresses and its hostname (the
    last two only if listen is not a loopback address)"""
    announce: bool = False
    """whether the daemon announces itself in the local network by multicast DNS, so that other
    machines can use it as a node; listen must be an address that they can reach"""
    announce_in: ExpandedPath | None = None
    """shared directory where the daemon keeps a file with its address while it serves; other
    machines find it by file+http:///DIRECTORY/*.json in [nodes.NAME]; listen must be an address
    that they can reach"""
    dashboard: bool = True
    """whether the dashboard is served, at /corral/"""
    engine_ui: Address | None = None
    """HOST:PORT of a second address, with llama.cpp's own web UI and all APIs; unset: it is not
    served"""
    batch_yields: bool = True
    """whether a batch request gives up its slot while an interactive one waits for it; it continues
    from there afterwards"""
    batch: BatchSettings = BatchSettings()
    limits: RequestLimits = RequestLimits()
    stored_responses: StoredResponseSettings = StoredResponseSettings()
    tls: TlsSettings | None = None
    auth_proxy: AuthProxySettings | None = None
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
            raise ValueError("engine_ui: the address is taken; the web UI needs a separate address")
        return self

    @model_validator(mode="after")
    def _has_roles(self) -> Self:
        if self.auth_proxy and not self.api_keys_file:
            raise ValueError("auth_proxy: its roles are entries of a keys file; set api_keys_file")
        return self

    @model_validator(mode="after")
    def _is_reachable(self) -> Self:
        if self.announce and is_loopback(self.host):
            raise ValueError(f"announce: other machines do not reach {self.listen}; set listen")
        return self

    @property
    def host(self) -> str:
        return host_of(self.listen)

    @property
    def port(self) -> int:
        """The TCP port to listen on; 0 takes any free one."""
        return port_of(self.listen)
