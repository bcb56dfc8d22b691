"""What the proxy can be told, as one frozen value with units and bounds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """Where the proxy listens, and the limits it keeps.

    Attributes:
        host: Address to listen on. A loopback address also turns on the check of the Host header.
        port: TCP port to listen on, 0 to 65535; 0 takes any free one.
        max_body_bytes: Largest request body taken, at least 1; counted after decompression.
        max_header_bytes: Longest request line and longest header field taken, at least 256.
        max_headers: Most header fields taken in one request, at least 16.
        idle_timeout_s: Seconds a client's connection may stay open without a request, above 0.
        connect_timeout_s: Seconds to wait for an instance to accept a connection, above 0.
        silence_timeout_s: Seconds an instance may send nothing before its answer is given up,
            above 0. There is no limit on the whole of an answer.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    max_body_bytes: int = 64 * 1024**2
    max_header_bytes: int = 16 * 1024
    max_headers: int = 128
    idle_timeout_s: float = 75.0
    connect_timeout_s: float = 5.0
    silence_timeout_s: float = 3600.0
