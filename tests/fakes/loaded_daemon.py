"""`corral serve` on a machine of two cores whose load a test chooses, in seconds for minutes.

Words: the directory with `proc` and `sys` of the machine.
"""

import functools
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from supervisor import cli, daemon_parts
from supervisor.adaptive import controller, thread_decider, threads
from supervisor.host import machine
from supervisor.host.processor_load import ProcessorReading, read_processor

_FASTER = 50


def main() -> None:
    root = Path(sys.argv[1])

    def read(pids: Iterable[int]) -> ProcessorReading:
        return read_processor(root, frozenset({0, 1}), pids)

    here = replace(machine.read(), physical_cores=2, efficiency_cores=0, quota_spare_cores=0)
    decider = functools.partial(thread_decider.ThreadDecider, read=read, read_machine=lambda: here)
    for module, name, value in (
        (daemon_parts, "ThreadDecider", decider),
        (machine, "read_from", lambda _root, _allowed: here),
    ):
        getattr(module, name)  # where it moved, the test would see the machine it runs on
        setattr(module, name, value)
    for module in (controller, thread_decider, threads):
        for name in [name for name in vars(module) if name.isupper() and name.endswith("_S")]:
            setattr(module, name, getattr(module, name) / _FASTER)
    sys.argv[1:] = ["serve"]
    cli.main()


if __name__ == "__main__":
    main()
