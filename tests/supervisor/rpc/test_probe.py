from __future__ import annotations

import pytest
from support.corral_cli import PATIENCE_S
from support.rpc_peer import peer

from supervisor.builds.discover import Engine
from supervisor.errors import WorkerMismatch, WorkerUnreachable
from supervisor.rpc.address import WorkerAddress, found_devices, free_port, probe


def at(port: int) -> WorkerAddress:
    return WorkerAddress("a", "127.0.0.1", port)


def test_a_worker_that_does_not_listen_is_named_with_the_reason(engine: Engine) -> None:
    address = at(free_port())
    with pytest.raises(WorkerUnreachable, match=r"worker a at .*: connection refused"):
        probe(engine, address)


def test_a_name_that_no_dns_has_is_a_reason(engine: Engine) -> None:
    with pytest.raises(WorkerUnreachable, match=r"worker a at nowhere\.invalid:1 does not answer"):
        probe(engine, WorkerAddress("a", "nowhere.invalid", 1))


def test_seed_000_another_version_of_the_protocol_is_refused(engine: Engine) -> None:
    with (
        peer("other version") as port,
        pytest.raises(WorkerMismatch, match=r"speaks RPC protocol 9\.0\.0, which this engine"),
    ):
        probe(engine, at(port), limit_s=PATIENCE_S)


def test_a_worker_that_is_in_use_is_not_waited_for(engine: Engine) -> None:
    with (
        peer("silent") as port,
        pytest.raises(WorkerUnreachable, match=r"did not answer within 0\.3 s") as caught,
    ):
        probe(engine, at(port), limit_s=0.3)
    assert "one engine at a time" in str(caught.value.hint)


def test_a_server_of_something_else_is_no_worker() -> None:
    with pytest.raises(WorkerUnreachable, match="not answer as a ggml-rpc-server"):
        found_devices(at(1), "Available devices:\n  Vulkan0: llvmpipe (100 MiB, 90 MiB free)\n")


def test_all_devices_of_a_worker_are_found() -> None:
    output = (
        "Available devices:\n"
        "  Vulkan0: llvmpipe (100 MiB, 90 MiB free)\n"
        "  RPC0: 127.0.0.1:7 (8192 MiB, 8000 MiB free)\n"
        "  RPC1: 127.0.0.1:7 (4096 MiB, 4000 MiB free)\n"
    )
    assert [found_device.total_mib for found_device in found_devices(at(7), output)] == [8192, 4096]
