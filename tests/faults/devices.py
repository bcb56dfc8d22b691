"""Memory that runs out at a load, of the machine and of Mesa's software Vulkan device. 25.

Without that device (`scripts/software_device` installs it) nothing is injected there, and the
result says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import psutil
from faults.daemon_under_test import DaemonUnderTest, kill
from faults.fault import Faults, Seen
from support import software_device
from support.corral_cli import until

DEVICES = Faults()

_KIB: Final = 1024
# The engine has a cache of 24 MiB when it is measured; one of 192 MiB has room, and not 384 MiB.
_ROOM_KIB: Final = 300 * _KIB
# Each arena would reserve 64 MiB of addresses, and there is one for each thread.
_RUN: Final = 'export MALLOC_ARENA_MAX=1\nexec $ENGINE "$@"'
_FLAGS: Final = """
gpu-layers = "all"
parallel = 4
batch-size = 32
ubatch-size = 32
cache-type-k = "f16"
cache-type-v = "f16"
spec-type = "none"
"""


def _on_device(
    inject: Callable[[DaemonUnderTest], Seen],
) -> Callable[[DaemonUnderTest], Seen]:
    def run(target: DaemonUnderTest) -> Seen:
        if not software_device.is_installed(target.models.engine.path):
            yield software_device.HOW_TO_INSTALL, software_device.HOW_TO_INSTALL
            return
        target.corral.env |= software_device.SHOW
        target.corral.env["CORRAL_CACHE_DIR"] = str(target.root / "cache")
        yield from inject(target)

    return run


def _out_of_memory(target: DaemonUnderTest) -> Seen:
    model = {"m": target.models.slow}
    engine = target.write_engine(_RUN)
    short = f"[models.m.flags]\nctx-size = 8192\n{_FLAGS}"
    target.serve(model, f'engine = "{engine}"', short)
    limit_kib = _virtual_kib(target.pid("m.0")) + _ROOM_KIB
    target.corral.ok("stop")
    profile = target.root / "config" / "profiles" / "long.toml"
    profile.parent.mkdir()
    profile.write_text(f'description = "long"\n[flags]\nctx-size = 131072\n{_FLAGS}', "utf-8")
    # Further allocations of the driver are refused, as by a card that is full.
    target.write_engine(f"ulimit -v {limit_kib}\n{_RUN}")
    target.serve(model, f'engine = "{engine}"', 'profile = "long"')
    steps = target.events("model.reduced")
    given_up = [f"{step['key']} {step['before']} to {step['after']}" for step in steps]
    yield "given up: ctx-size 131072 to 65536", f"given up: {', '.join(given_up)}"
    yield "answered", target.ask("m")
    yield "0 failures count", f"{target.instance('m.0').failures} failures count"
    shown = "shown" if "for want of memory" in target.corral.ok("status") else "not shown"
    yield "shown", shown


DEVICES.add(25, "device out of memory while a model loads")(_on_device(_out_of_memory))
DEVICES.add(25, "main memory refused while a model loads")(_out_of_memory)


def _virtual_kib(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().vms) // _KIB


@DEVICES.add(25, "device filled by another program while a model is served")
@_on_device
def _(target: DaemonUnderTest) -> Seen:
    engine = target.models.engine
    device = software_device.write_engine(
        target.root, engine.path, total_mib=64, library_dirs=engine.library_dirs
    )
    patience = "[supervisor.restart]\nbackoff_initial_s = 0.2\nbackoff_max_s = 0.2\n"
    limits = f"[supervisor]\ndevice_memory_wait_s = 0.2\n{patience}"
    own = f"[models.m.flags]\nctx-size = 512\n{_FLAGS}"
    forbids = f'on_out_of_memory = "fail"\n{own}'
    target.serve({"m": target.models.tiny}, f'engine = "{device.engine}"\n{limits}', forbids)
    device.set_free(0)
    before = target.pid("m.0")
    kill(before)
    until(lambda: (one := target.instance("m.0").error) and one["code"] != "killed")
    yield "backoff: device_memory_short", target.state_of("m.0", "backoff")
    seen = device.listings
    until(lambda: device.listings > seen + 6)  # more often than a failure would be tried again
    device.set_free(64)
    yield "ready again", target.ready_again("m.0", before)
    yield "answered", target.ask("m")
