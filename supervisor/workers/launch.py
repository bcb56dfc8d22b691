"""The launch of a worker on this machine."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from supervisor.engine_client.endpoint import Endpoint
from supervisor.engines.discover import Engine
from supervisor.host.paths import Directories, make_ours, make_private
from supervisor.process.launch import Launch, ProcessTag, clean_environment
from supervisor.workers.program import WorkerOptions, command, find

# Names of models and workers have no tilde, so neither logs nor tags clash with those of instances.
_NAME: Final = "worker~{}"


@dataclass(frozen=True, slots=True)
class WorkerLaunch:
    """A launch, and a clause for each option that the build at hand does not have."""

    launch: Launch
    dropped: tuple[str, ...]


def worker_launch(
    engine: Engine, name: str, options: WorkerOptions, directories: Directories
) -> WorkerLaunch:
    """Make the launch of a worker; runs the program's help.

    Raises:
        EngineMissing, EngineBroken: The program is missing, or does not run.
        AccessDenied: A directory cannot be used.
    """
    program = find(engine)
    made = command(program, options)
    label = _NAME.format(name)
    tag = ProcessTag(directories.runtime, label, Path(made.argv[0]))
    env = clean_environment(
        os.environ,
        program=program.path,
        library_dirs=program.library_dirs,
        api_key="",
        marker=tag.text,
    )
    launch = Launch(
        argv=made.argv,
        # Where --cache keeps tensors, in a directory `rpc`. Source: tools/rpc/rpc-server.cpp.
        env={**env, "LLAMA_CACHE": str(_tensors(directories))},
        cwd=program.path.parent,
        endpoint=Endpoint(host=options.host, port=options.port),
        api_key="",
        log_path=make_private(directories.log) / f"{label}.log",
    )
    return WorkerLaunch(launch, made.dropped)


def _tensors(directories: Directories) -> Path:
    return make_private(make_ours(directories.cache) / "workers")
