"""`corral serve` on a machine of two cores whose load a test chooses, in seconds for minutes.

Words: the directory with `proc` and `sys` of the machine.
"""

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from supervisor.autoscale import apply, threads
from supervisor.cli import app
from supervisor.daemon import parts
from supervisor.system import machine
from supervisor.system.processor_load import ProcessorReading, read_processor

_FASTER = 50


def main() -> None:
    root = Path(sys.argv[1])

    def read(pids: Iterable[int]) -> ProcessorReading:
        return read_processor(root, frozenset({0, 1}), pids)

    here = replace(machine.read(), physical_cores=2, efficiency_cores=0, quota_spare_cores=0)

    class Decider(threads.ThreadDecider):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, read=read, read_machine=lambda: here, **options)

    for module, name, value in (
        (parts, "ThreadDecider", Decider),
        (machine, "read_from", lambda _root, _allowed, _environ: here),
    ):
        getattr(module, name)  # where it moved, the test would see the machine it runs on
        setattr(module, name, value)
    for module in (apply, threads):
        for name in [name for name in vars(module) if name.isupper() and name.endswith("_S")]:
            setattr(module, name, getattr(module, name) / _FASTER)
    sys.argv[1:] = ["serve"]
    app.main()


if __name__ == "__main__":
    main()
