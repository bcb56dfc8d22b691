"""Makes what an instance runs: settings → plan → launch, anew for every run.

Planning anew costs milliseconds (engines and GGUFs are cached by path, size and mtime), and it
means that a model file put right, or an engine upgraded in place, counts from the next start on.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from supervisor.errors import CorralError, NoSuchModel
from supervisor.fleet.difference import Place, Recipe, Stamp
from supervisor.fleet.drafting import drafting
from supervisor.fleet.guest import Rules, Stay
from supervisor.fleet.learned import Learned
from supervisor.fleet.slots.keeping import keeping
from supervisor.host.paths import Directories, make_private
from supervisor.life import prompts
from supervisor.life.launch import Endpoint, Launch, Marker, clean_environment
from supervisor.life.prompts import WarmPrompt
from supervisor.life.restart import Policy
from supervisor.profile import draft, gguf, machine, profile
from supervisor.profile import engine as engines
from supervisor.profile.engine import Engine
from supervisor.profile.fit import Room, refuse, room
from supervisor.profile.machine import Machine
from supervisor.profile.plan import ModelEntry, Plan, make_plan, unix_sockets
from supervisor.profile.replicas import Replicas, decide
from supervisor.settings.model import ModelTable, VariantTable
from supervisor.settings.root import Settings

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
        self._replicas: dict[str, Replicas] = {}
        self.keeping = keeping(directories, settings.supervisor)
        self.learned = Learned(directories.prompts)

    @property
    def instances(self) -> int:
        """Return how many processes share the machine when all models are up."""
        return sum(self.replicas(name).count for name in self.entries)

    def replicas(self, model: str) -> Replicas:
        """Return how many instances serve a model; decided once where that is left to us.

        A model that cannot be planned has one, whose start then says why.

        Raises:
            NoSuchModel: It is not configured.
        """
        entry = self.entry(model)
        if entry.replicas != "auto":
            return Replicas(entry.replicas, "as set")
        if model not in self._replicas:
            self._replicas[model] = self._decide(entry)
        return self._replicas[model]

    def _decide(self, entry: ModelEntry) -> Replicas:
        models = len(self.entries)
        try:
            plan = self._plan(entry, instances=models)
        except CorralError:
            return Replicas(1, "it cannot be planned")
        return decide(plan.burden, machine.read(), self.room(plan.engine), models)

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
        return self._plan(self.entry(model), instances=max(1, self.instances))

    def plan_at(self, place: Place) -> Plan:
        """Return what the instance in a place runs, and refuse what can never fit. Blocks likewise.

        Raises:
            NoRoom: It takes more memory than models may have here.
            CorralError: As `plan` does.
        """
        plan = self.plan(place.model)
        devices = self.replicas(place.model).devices
        if place.number < len(devices):
            entry = self.entry(place.model)
            flags = {**entry.flags, "device": devices[place.number]}
            plan = self._plan(replace(entry, flags=flags), instances=max(1, self.instances))
        refuse(place.model, plan.burden, self.room(plan.engine))
        return plan

    def room(self, engine: Engine) -> Room:
        """Return the memory that models may take here."""
        return room(machine.read(), engine.devices, self._settings.supervisor.memory_budget)

    def _plan(self, entry: ModelEntry, *, instances: int) -> Plan:
        cache = self._directories.cache
        under = profile.load(entry.profile, self._directories.profiles)
        found = gguf.read(entry.path, cache_dir=cache)
        projector = {**under.flags, **entry.flags}.get("mmproj")
        return make_plan(
            entry,
            under,
            self.engine(),
            found,
            self._machine(),
            instances=instances,
            draft=draft.choose(entry.draft, found, cache_dir=cache),
            projector_bytes=stamp(Path(str(projector))).size_bytes or 0 if projector else 0,
        )

    def _machine(self) -> Machine:
        """Return the machine, with no more memory than models may have by the settings."""
        here = machine.read()
        budget = self._settings.supervisor.memory_budget
        return replace(here, memory_bytes=min(budget or here.memory_bytes, here.memory_bytes))

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
            draft=self._draft_stamp(entry),
            flags={**under.flags, **entry.flags},
            args=entry.args,
        )

    def _draft_stamp(self, entry: ModelEntry) -> Stamp | None:
        if entry.draft != draft.AUTO:
            return stamp(entry.draft) if entry.draft else None
        cache = self._directories.cache
        with suppress(CorralError):
            found = draft.choose(
                entry.draft, gguf.read(entry.path, cache_dir=cache), cache_dir=cache
            )
            return stamp(found.gguf.path) if found.gguf else None
        return None

    def stay(self, model: str) -> Stay:
        """Return how a model comes and goes.

        Raises:
            NoSuchModel: It is not configured.
        """
        table = self._settings.models[self.entry(model).name]
        return Stay(
            preload=table.preload,
            is_pinned=table.pinned,
            ttl_s=table.ttl_s,
            min_residency_s=table.min_residency_s,
        )

    def variants(self, model: str) -> Mapping[str, VariantTable]:
        """Return the variants of a model by their names; none where it is not configured."""
        table = self._settings.models.get(model)
        return table.variants if table else {}

    @property
    def rules(self) -> Rules:
        """Return how all models come and go."""
        table = self._settings.supervisor
        return Rules(table.swap_wait_s, table.give_up_below)

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
        """Return one run of a plan: its own key, its own socket or a port that the system picks.

        Raises:
            SettingsInvalid: A prompt to be read ahead is not there.
            StateDenied: The directory of logs cannot be used.
        """
        endpoint = self._endpoint(plan.engine, instance)
        api_key = secrets.token_hex(16)
        where = self._directories
        argv = (*_argv(plan, endpoint), *self.keeping.make_room(plan, instance))
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
            prompts=self._prompts(plan.model),
            has_ram=plan.has_ram,
            drafting=drafting(plan),
        )

    def _prompts(self, model: str) -> tuple[WarmPrompt, ...]:
        """Return what a model's instances read ahead: what is set, then what was learned."""
        table = self._settings.models[model]
        learned = self.learned.prompts(model) if table.learn_prompts else []
        return (*map(prompts.read, table.warm_prompts), *learned)

    def learns(self, model: str) -> bool:
        """Return whether openings of a model's conversations are learned."""
        table = self._settings.models.get(model)
        return table is not None and table.learn_prompts

    def launch_argv(self, plan: Plan, instance: str) -> tuple[str, ...]:
        """Return the command line that a launch of a plan has."""
        argv = _argv(plan, self._endpoint(plan.engine, instance))
        return (*argv, *self.keeping.words(plan, instance))

    def _endpoint(self, engine: Engine, instance: str) -> Endpoint:
        socket = self._directories.engine_socket(instance) if unix_sockets(engine) else None
        return Endpoint(socket=socket, host=_LOOPBACK, port=0)


def stamp(path: Path) -> Stamp:
    """Return what tells a file from another of its path."""
    try:
        found = path.stat()
    except (OSError, ValueError):  # missing; no path at all
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
