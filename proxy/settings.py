"""What the proxy can be told, as one frozen value with units and bounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from proxy.request_limits.limits import RequestLimits

Policy = Literal["affinity", "least-busy", "round-robin"]


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """Where the proxy listens, and the limits it keeps.

    Attributes:
        host: Address to listen on. On a loopback address only loopback names and `hosts` are taken
            in the Host header.
        port: TCP port to listen on, 0 to 65535; 0 takes any free one.
        max_body_bytes: Largest request body taken, at least 1; counted after decompression.
        max_body_ratio: How many times its size a compressed body may become, at least 1.
        max_body_values: Most values in a JSON body, at least 1; see `count.count_values`.
        max_body_depth: How deep lists and objects may lie in each other, 1 to 250: deeper ones
            cannot be written again.
        body_memory_bytes: What the bodies of all requests may take together, at least 1, with
            what is made of them, by estimate; a body that is alone may take more.
        max_header_bytes: Longest request line and longest header field taken, at least 256.
        max_headers: Most header fields taken in one request, at least 16.
        max_header_total_bytes: Bytes that a header may have altogether before its end, at least
            4096; as many may come without a byte of a body: chunk extensions, trailers.
        max_connections: Connections of clients at once, at least 8, or None: as many as the limit
            of open files allows, and 1024 at most. It never exceeds that limit.
        idle_timeout_s: Seconds a client's connection may stay open without a request, above 0.
        connect_timeout_s: Seconds to wait for an instance to accept a connection, above 0.
        upstream_read_timeout_s: Seconds an instance may send nothing before its answer is given up,
            above 0. There is no limit on the whole of an answer.
        cancel_timeout_s: Seconds an instance may go on computing for a request that is over before
            that is reported, above 0.
        header_timeout_s: Seconds a client may take to send the header of a request, above 0.
        body_timeout_s: Seconds a client may take to send a body, above 0.
        crash_memory_s: Seconds for which a request is remembered that an engine crashed with, and
            for which it is refused after the second time, at least 0.
        client_write_timeout_s: Seconds a client may take nothing of what is sent to it, above 0.
        queue_max: Requests that may wait for one model, at least 0; one more is refused.
        queue_timeout_s: Seconds a request may wait for its turn or for its model to load, at least
            0.
        policy: Which instance is asked: the one that holds the conversation, the one with most
            slots free, or one after the other.
        prefix_index_max_blocks: Blocks of prompts remembered over all instances, at least 1.
        api_keys_file: The API keys that are taken, or None: anybody may ask.
        allowed_origins: Origins whose pages may ask, besides the local ones; see
            `guard.origins_of`.
        allowed_hosts: Names of this machine that are taken in Host, besides the loopback ones and,
            where `host` is no loopback address, IP addresses and what the system calls this
            machine.
        limits: What one request may ask of an engine.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    max_body_bytes: int = 16 * 1024**2
    max_body_ratio: float = 100.0
    max_body_values: int = 500_000
    max_body_depth: int = 200
    body_memory_bytes: int = 256 * 1024**2
    max_header_bytes: int = 16 * 1024
    max_headers: int = 128
    max_header_total_bytes: int = 32 * 1024
    max_connections: int | None = None
    idle_timeout_s: float = 75.0
    connect_timeout_s: float = 5.0
    upstream_read_timeout_s: float = 3600.0
    cancel_timeout_s: float = 60.0
    header_timeout_s: float = 20.0
    body_timeout_s: float = 300.0
    crash_memory_s: float = 600.0
    client_write_timeout_s: float = 120.0
    queue_max: int = 128
    queue_timeout_s: float = 120.0
    policy: Policy = "affinity"
    prefix_index_max_blocks: int = 200_000
    api_keys_file: Path | None = None
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    limits: RequestLimits = RequestLimits()  # noqa: RUF009 (frozen)
