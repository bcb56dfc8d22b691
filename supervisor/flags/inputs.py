"""What values that are worked out for a model depend on. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from supervisor.gguf.metadata import Gguf
from supervisor.host.machine import Machine


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """What the derived values depend on.

    Attributes:
        gguf: The model.
        machine: The machine.
        device_bytes: Memory of all devices that layers can be offloaded to; 0 without a device.
        instances: Processes that share the machine, this one among them.
    """

    gguf: Gguf
    machine: Machine
    device_bytes: int
    instances: int

    @property
    def share_bytes(self) -> int:
        """Return the memory that one instance may use beside the weights.

        On a device, nine tenths of it without the weights; in main memory, three quarters without
        the weights, which instances of one model share by mapping the file. Never less than an
        eighth of the memory, or the plan would be for nothing.
        """
        if self.device_bytes:
            room = self.device_bytes * 9 // 10 - self.gguf.tensor_bytes
            return max(room, self.device_bytes // 8) // self.instances
        memory = self.machine.memory_bytes
        return max(memory * 3 // 4 - self.gguf.tensor_bytes, memory // 8) // self.instances

    @property
    def kv_budget_bytes(self) -> int:
        """Return what the KV cache may take: the device's whole share, or half of main memory's."""
        return self.share_bytes if self.device_bytes else self.share_bytes // 2
