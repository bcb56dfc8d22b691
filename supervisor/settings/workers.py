"""`[workers.NAME]`: an RPC server that computes layers for models."""

from __future__ import annotations

import re
from typing import Annotated, Final, Self

from pydantic import AfterValidator, Field, model_validator

from proxy.config.types import SettingsTable, Text
from supervisor.host.exposure import exposure
from supervisor.settings.types import Bytes

# Engines reach workers by IPv4 only. Source: llama.cpp, ggml-rpc, transport.cpp (AF_INET).
_ADDRESS: Final = re.compile(r"([A-Za-z0-9](?:[A-Za-z0-9.-]{0,251}[A-Za-z0-9])?):([1-9]\d{0,4})")
_PORT_MAX: Final = 65_535
_LOCAL_ONLY: Final = ("port", "threads", "device", "cache")


def _worker_address(text: str) -> str:
    found = _ADDRESS.fullmatch(text)
    if not found or int(found[2]) > _PORT_MAX:
        raise ValueError("not HOST:PORT, as 192.168.1.7:50052")
    if exposure(found[1]) == "public":
        raise ValueError("a public address; the protocol has no encryption: use a tunnel")
    if exposure(found[1]) == "every":
        raise ValueError("not the address of one machine")
    return text


class WorkerSettings(SettingsTable):
    """`[workers.NAME]`: a `ggml-rpc-server`, here or on another machine."""

    address: Annotated[str, AfterValidator(_worker_address)] | None = Field(
        None, description="HOST:PORT of one that runs already, such as that of a `corral worker`"
    )
    local: bool = Field(
        default=False, description="the daemon runs one on this machine, for itself alone"
    )
    port: int = Field(0, ge=0, le=_PORT_MAX, description="of a local one; 0: any free port")
    threads: int | None = Field(
        None, ge=1, le=1024, description="of a local one; unset: half of all CPUs, as it decides"
    )
    device: Text | None = Field(
        None, description="devices that a local one offers, with commas; unset: all, or the CPU"
    )
    cache: bool = Field(
        default=False, description="a local one keeps large tensors on disk, for faster loads"
    )
    memory: Annotated[Bytes, Field(ge=1024**2, le=2**60)] | None = Field(
        None, description="memory that a model may take there; unset: what it reports"
    )

    @model_validator(mode="after")
    def _is_one_kind(self) -> Self:
        if self.local == (self.address is not None):
            raise ValueError("needs either address = HOST:PORT or local = true")
        wrong = [key for key in _LOCAL_ONLY if key in self.model_fields_set]
        if wrong and not self.local:
            raise ValueError(f"{wrong[0]} is for local = true; set it where the worker runs")
        return self
