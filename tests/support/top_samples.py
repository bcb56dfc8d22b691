"""Answers of a daemon, for the tests of commands' output and of the control socket."""

from dataclasses import replace
from typing import Any

from proxy.observe.past import RequestStats
from supervisor.daemon.control_messages import (
    DaemonStatus,
    DeviceStatus,
    InstanceStatus,
    ModelStatus,
)

STATUS = DaemonStatus(
    pid=1,
    version="0",
    url="http://127.0.0.1:8080",
    tls_cert=None,
    listen="127.0.0.1:8080",
    keyless=[],
    up_s=1.0,
    stopping=False,
    config=None,
    groups=[],
    models=[],
    nodes=[],
    weights=[],
    capture=None,
    batches=[],
    workers=[],
    devices=[],
    yielded=None,
    gave_way=None,
)


DEVICES = [
    DeviceStatus(
        id="GPU-0",
        name="NVIDIA H100",
        load=0.43,
        memory_used_bytes=20 * 1024**3,
        memory_total_bytes=80 * 1024**3,
        temperature_c=61.0,
        power_w=312.4,
        power_limit_w=700.0,
        throttled=["power"],
        problem=None,
    ),
    DeviceStatus(
        id="0000:03:00.0",
        name="AMD 73FF",
        load=None,
        memory_used_bytes=None,
        memory_total_bytes=None,
        temperature_c=None,
        power_w=None,
        power_limit_w=None,
        throttled=None,
        problem="it is suspended",
    ),
]


def request(request_id: str, **changes: Any) -> RequestStats:
    found = RequestStats(
        id=request_id,
        client="127.0.0.1",
        path="/v1/chat/completions",
        model="chat",
        instance="chat.0",
        slot=0,
        priority="interactive",
        phase="decode",
        position=None,
        age_s=1.0,
        prompt_tokens=10,
        prompt_tokens_done=10,
        cached_tokens=0,
        decoded_tokens=5,
        tokens_per_second=2.0,
    )
    return replace(found, **changes)


def instance(name: str, **changes: Any) -> InstanceStatus:
    found = InstanceStatus(
        name=name,
        state="ready",
        retiring=False,
        pid=2,
        run=1,
        up_s=5.0,
        restarts=0,
        failures=0,
        retry_in_s=None,
        progress=None,
        slots=4,
        slots_busy=1,
        tokens_per_second=30.0,
        memory_bytes=1024,
        address="/run/chat.0.sock",
        engine=None,
        log=None,
        error=None,
        warnings=[],
        draft=None,
    )
    return replace(found, **changes)


def model(name: str, *instances: InstanceStatus) -> ModelStatus:
    return ModelStatus(
        name=name,
        state="loaded",
        reason=None,
        preload=True,
        aliases=[],
        path="/models/chat.gguf",
        profile="base",
        slots=4,
        ctx_size=4096,
        trial=None,
        not_persisted_reason=None,
        chats=True,
        changed={},
        engine_tools="off",
        adapted=[],
        reduced=[],
        waiting=None,
        idle=None,
        instances=[*instances],
    )
