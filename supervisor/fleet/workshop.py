"""Makes what an instance runs: settings → plan → launch, anew for every run.

Planning anew costs milliseconds (engines and GGUFs are cached by path, size and mtime), and it
means that a model file put right, or an engine upgraded in place, counts from the next start on.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from supervisor.errors import NoSuchModel
from supervisor.fleet.difference import Recipe, Stamp
from supervisor.host.paths import Directories, make_private
from supervisor.life.launch import Endpoint, Launch, Marker, clean_environment
from supervisor.life.restart import Policy
from supervisor.profile import engine as engines
from supervisor.profile import gguf, machine, profile
from supervisor.profile.engine import Engine
from supervisor.profile.plan import ModelEntry, Plan, make_plan, unix_sockets
from supervisor.settings import ModelTable, Settings

_LOOPBACK: Final = "127.0.0.1"


class Workshop:
    """Plans and launches for every model of one settings value."""

    def __init__(self, settings: Settings, directories: Directories) -> None:
        self._engine_setting = settings.engine
        self._settings = settings
        self._directories = directories
        self.entries: Mapping[str, ModelEntry] = {
            name: _entry(name, model) for name, model in settings.models.items()
        }

    @property
    def instances(self) -> int:
        """Return how many processes share the machine when all models are up."""
        return sum(entry.replicas for entry in self.entries.values())

    def engine(self) -> Engine:
        """Return the engine that is used.

        Raises:
            EngineMissing, EngineBroken: There is none, or it does not run.
        """
        return engines.load(self._engine_setting, cache_dir=self._directories.cache)

    def plan(self, model: str) -> Plan:
        """Return what a model's instances run, from what is on disk now. Blocks for its reading.

        Raises:
            NoSuchModel: It is not configured.
            EngineMissing, EngineBroken, ModelInvalid, SettingsInvalid: It cannot be run.
        """
        entry = self.entry(model)
        cache = self._directories.cache
        return make_plan(
            entry,
            profile.load(entry.profile, self._directories.profiles),
            self.engine(),
            gguf.read(entry.path, cache_dir=cache),
            machine.read(),
            instances=max(1, self.instances),
            draft=gguf.read(entry.draft, cache_dir=cache) if entry.draft else None,
        )

    def recipe(self, model: str, engine: Engine) -> Recipe:
        """Return what a model's instances are made from, as it is on disk now.

        Files that are missing are no error here: their instances differ from all that run.

        Raises:
            NoSuchModel: It is not configured.
            SettingsInvalid: Its profile is not there, or wrong.
        """
        entry = self.entry(model)
        under = profile.load(entry.profile, self._directories.profiles)
        return Recipe(
            engine=stamp(engine.path),
            library_dirs=engine.library_dirs,
            model=stamp(entry.path),
            draft=stamp(entry.draft) if entry.draft else None,
            flags={**under.flags, **entry.flags},
            args=entry.args,
        )

    def policy(self, model: str) -> Policy:
        """Return how patiently a model's instances are tried again after a fault.

        Raises:
            NoSuchModel: It is not configured.
        """
        ours = self._settings.supervisor.restart.model_dump()
        its = self._settings.models[self.entry(model).name].restart.model_dump(exclude_none=True)
        return Policy(**{**ours, **its})

    def entry(self, model: str) -> ModelEntry:
        """Return a model's entry.

        Raises:
            NoSuchModel: It is not configured.
        """
        if model in self.entries:
            return self.entries[model]
        known = ", ".join(self.entries) or "none"
        raise NoSuchModel(f"no model is named {model!r}", hint=f"models there are: {known}")

    def launch(self, plan: Plan, instance: str) -> Launch:
        """Return one run of a plan: its own key, its own socket or a port that the system picks."""
        endpoint = self._endpoint(plan.engine, instance)
        api_key = secrets.token_hex(16)
        where = self._directories
        argv = _argv(plan, endpoint)
        return Launch(
            argv=argv,
            env=clean_environment(
                os.environ,
                library_dirs=plan.engine.library_dirs,
                api_key=api_key,
                marker=Marker(where.runtime, instance, Path(argv[0])).text,
            ),
            cwd=plan.engine.path.parent,
            endpoint=endpoint,
            api_key=api_key,
            log_path=make_private(where.log) / f"{instance}.log",
        )

    def launch_argv(self, plan: Plan, instance: str) -> tuple[str, ...]:
        """Return the command line that a launch of a plan has."""
        return _argv(plan, self._endpoint(plan.engine, instance))

    def _endpoint(self, engine: Engine, instance: str) -> Endpoint:
        socket = self._directories.engine_socket(instance) if unix_sockets(engine) else None
        return Endpoint(socket=socket, host=_LOOPBACK, port=0)


def stamp(path: Path) -> Stamp:
    """Return what tells a file from another of its path."""
    try:
        found = path.stat()
    except OSError:
        return Stamp(path)
    return Stamp(path, found.st_size, found.st_mtime_ns)


def _argv(plan: Plan, endpoint: Endpoint) -> tuple[str, ...]:
    if endpoint.socket:
        return plan.argv(host=str(endpoint.socket), port=None)
    return plan.argv(host=endpoint.host, port=endpoint.port)


def _entry(name: str, model: ModelTable) -> ModelEntry:
    return ModelEntry(
        name=name,
        path=model.path,
        profile=model.profile,
        replicas=model.replicas,
        flags=model.flags,
        args=model.args,
        draft=model.draft,
        aliases=model.aliases,
    )
