"""Makes what an instance runs: settings → plan → launch, anew for every run.

Planning anew costs milliseconds (engines and GGUFs are cached by path, size and mtime), and it
means that a model file put right, or an engine upgraded in place, counts from the next start on.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Final

from supervisor.errors import NoSuchModel
from supervisor.host.paths import Directories, make_private
from supervisor.life.launch import Endpoint, Launch, clean_environment
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
        return Launch(
            argv=_argv(plan, endpoint),
            env=clean_environment(
                os.environ,
                library_dirs=plan.engine.library_dirs,
                api_key=api_key,
                marker=instance,
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
