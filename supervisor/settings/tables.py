"""The tables of `corral.toml` but those of models: the proxy, the supervisor, other machines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from supervisor.settings.limits import LimitsTable
from supervisor.settings.types import Address, Bytes, ExpandedPath, NodeAddress, Text


class Table(BaseModel):
    """A table of which every key is known."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ProxyTable(Table):
    """`[proxy]`: where clients connect, and what they may send."""

    listen: Address = Field(
        "127.0.0.1:8080", description="HOST:PORT that clients connect to; port 0 takes any free one"
    )
    max_body_bytes: int = Field(
        16 * 1024**2,
        ge=1024,
        le=4 * 1024**3,
        description="largest request body taken, in bytes, decompressed; "
        "raise it where large pictures or sounds are sent",
    )
    max_body_ratio: float = Field(
        100,
        ge=1,
        le=10_000,
        allow_inf_nan=False,
        description="how many times its size a compressed request body may become",
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
        description="how deep lists and objects of a JSON request body may lie in each other",
    )
    body_memory_bytes: int = Field(
        256 * 1024**2,
        ge=1024**2,
        le=1024**4,
        description="memory that the bodies of all requests may take together, in bytes, "
        "those of one client half of it; a request that would need more gets 503",
    )
    max_header_total_bytes: int = Field(
        32 * 1024, ge=4096, le=1024**2, description="largest request header taken, in bytes"
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
        description="seconds an engine may send nothing before its answer is given up",
    )
    cancel_timeout_s: float = Field(
        60,
        ge=1,
        le=86_400,
        description="seconds an engine may go on computing for a request that is over before it is "
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
        description="seconds a client may take nothing of what is sent to it before it is cut",
    )
    crash_memory_s: float = Field(
        600,
        ge=0,
        le=86_400,
        description="seconds for which a request is refused after the second engine crashed while "
        "it computed it; 0 for never",
    )
    queue_max: int = Field(
        128, ge=0, le=100_000, description="requests that may wait for one model; more get 429"
    )
    queue_timeout_s: float = Field(
        120,
        ge=0,
        le=86_400,
        description="seconds a request may wait for its turn or for its model to load",
    )
    policy: Literal["affinity", "least-busy", "round-robin"] = Field(
        "affinity",
        description="which engine is asked: affinity (the one that holds the conversation), "
        "least-busy or round-robin",
    )
    prefix_index_max_blocks: int = Field(
        200_000, ge=1, le=100_000_000, description="blocks of prompts remembered for affinity"
    )
    api_keys_file: ExpandedPath | None = Field(
        None, description="TOML file of API keys that are taken; unset: anybody may ask"
    )
    allowed_origins: tuple[Text, ...] = Field(
        (),
        description="origins whose web pages may ask, besides the local ones; "
        "one * may stand in the host, as in https://*.example.com",
    )
    allowed_hosts: tuple[Text, ...] = Field(
        (),
        description="names of this machine taken in Host, besides localhost, IP addresses and its "
        "hostname (the last two only where listen is no loopback address)",
    )
    limits: LimitsTable = LimitsTable()


class RestartTable(Table):
    """`[supervisor.restart]`: how patiently instances are tried again after a fault."""

    backoff_initial_s: float = Field(
        0.5, gt=0, le=3600, description="longest wait after the first fault; doubles with each"
    )
    backoff_max_s: float = Field(60, gt=0, le=86_400, description="longest wait ever")
    max_failures: int = Field(
        5, ge=1, le=1000, description="faults close together after which it is given up"
    )
    failure_half_life_s: float = Field(
        300, gt=0, le=604_800, description="time in which the memory of faults halves"
    )


class SupervisorTable(Table):
    """`[supervisor]`: how long each phase of an instance's life may take, in seconds."""

    watch_settings: bool = Field(
        default=False, description="reload when this file changes; it is looked at every 2 s"
    )

    load_timeout_s: float = Field(
        300,
        gt=0,
        le=86_400,
        description="silence allowed while loading, since the engine's last sign of life",
    )
    warm_timeout_s: float = Field(
        30, gt=0, le=3600, description="time allowed for the warm-up request"
    )
    unhealthy_timeout_s: float = Field(
        60,
        gt=0,
        le=3600,
        description="time to answer again before it is restarted; less while clients wait for it",
    )
    drain_timeout_s: float = Field(
        300, ge=0, le=86_400, description="time for running requests to finish before they are cut"
    )
    stop_timeout_s: float = Field(
        5, gt=0, le=600, description="time to exit when asked, before SIGKILL"
    )
    liveness_interval_s: float = Field(
        5,
        ge=1,
        le=3600,
        description="an engine with work in which nothing moves for two of these is replaced",
    )
    memory_budget: Annotated[Bytes, Field(ge=1024**2, le=2**60)] | None = Field(
        None,
        description="main memory that all models together may take, in bytes or as in 12 GiB; "
        "unset: all but a twentieth",
    )
    idle_probe_s: float = Field(
        60, ge=0, le=86_400, description="an idle engine makes one token this often; 0 for never"
    )
    eviction_wait_s: float = Field(
        20,
        ge=0,
        le=86_400,
        description="how long requests for a model that is not loaded wait for others to fall idle "
        "before those are given nothing new",
    )
    abandon_load_below: float = Field(
        0.5,
        ge=0,
        le=1,
        description="share of a load below which it is given up when nobody waits for it any more "
        "and another model needs the memory",
    )
    batch_timeout_s: float = Field(
        300, gt=0, le=86_400, description="time an engine may compute on one batch"
    )
    persist_slots: bool = Field(
        default=True,
        description="keep conversations on the disk while their model is away, for this user only",
    )
    slots_disk_budget: Annotated[Bytes, Field(ge=1024**2, le=2**60)] = Field(
        8 * 1024**3, description="disk that kept conversations may take, in bytes or as in 8 GiB"
    )
    slot_save_timeout_s: float = Field(
        10, gt=0, le=3600, description="time an instance may take to save its conversations"
    )
    restart: RestartTable = RestartTable()


class NodeTable(Table):
    """`[nodes.NAME]`: another machine whose models are served here too."""

    url: NodeAddress = Field(
        description="where it listens, as http://192.168.1.7:8080: another llama-corral, a "
        "llama-server, or anything with OpenAI's API"
    )
    key_file: ExpandedPath | None = Field(
        None, description="file with the API key it asks for, readable by this user alone"
    )
    models: tuple[Text, ...] = Field(
        (), description="those of its models that are served here; unset: all"
    )
    slots: int = Field(
        4, ge=1, le=1024, description="requests it gets at once, where it does not say itself"
    )
    local_first: bool = Field(
        default=True,
        description="whether it is asked only when nothing here has a slot free; "
        "a conversation that began there stays there",
    )
