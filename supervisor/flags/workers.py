"""The options of a model whose layers RPC workers compute. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from supervisor.engines.discover import Device
from supervisor.engines.help import Flags
from supervisor.errors import SettingsInvalid
from supervisor.flags.setting import Setting, Settings

RPC: Final = "rpc"
SPLIT: Final = "tensor-split"


@dataclass(frozen=True, slots=True)
class RpcWorker:
    """A worker as a plan uses it."""

    name: str
    address: str  # HOST:PORT
    devices: tuple[Device, ...]  # as it reports them, or assumed


def devices_of(workers: Sequence[RpcWorker]) -> tuple[Device, ...]:
    """The devices of all workers with the names that an engine gives them.

    Source: llama.cpp, ggml-rpc.cpp, ggml_backend_rpc_add_server: RPC0, RPC1 … in the order of
    `--rpc`; devices of this machine come after them.
    """
    found = [replace(device, worker=one.name) for one in workers for device in one.devices]
    return tuple(replace(device, name=f"RPC{number}") for number, device in enumerate(found))


def rpc_settings(
    workers: Sequence[RpcWorker],
    own: Settings,
    flags: Flags,
    local: Sequence[Device],
    split: str | None = None,
) -> Settings:
    """The settings that put all layers on workers, `--rpc` first; `own` are those of the model.

    `split` is the one to which layers were moved.

    Raises:
        SettingsInvalid: The build has no RPC, or the model sets `rpc` itself.
    """
    if not flags.find(RPC):
        raise SettingsInvalid(
            "the engine was built without RPC, so workers cannot compute layers for it",
            hint="use a build with -DGGML_RPC=ON (`corral engine list`)",
        )
    if RPC in own:
        raise SettingsInvalid("rpc is set beside workers", hint="use one of the two")
    origin = f"workers {', '.join(one.name for one in workers)}"
    devices = devices_of(workers)
    found = {
        RPC: Setting(",".join(one.address for one in workers), origin),
        "gpu-layers": Setting("all", origin, "every layer goes to a worker"),
        SPLIT: Setting(split, "corral balance", "by the time of each worker")
        if split
        else Setting(*_split(devices, origin)),
        "fit": Setting("off", origin, "the split is fixed"),
    }
    if local:
        names = ",".join(one.name for one in devices)
        found["device"] = Setting(names, origin, "layers go to workers only")
    return found


def fitting_split(own: Settings, workers: Sequence[RpcWorker]) -> Settings:
    """The model's own settings without a split that is for another number of devices."""
    split = own.get(SPLIT)
    if split is None or len(str(split.value).split(",")) == len(devices_of(workers)):
        return own
    return {key: one for key, one in own.items() if key != SPLIT}


def _split(devices: Sequence[Device], origin: str) -> tuple[str, str, str]:
    sizes = [one.total_mib for one in devices]
    if len(set(sizes)) == 1:
        return ",".join("1" for _ in sizes), origin, "equal: they have as much memory each"
    return ",".join(map(str, sizes)), origin, "by their memory in MiB"
