"""Makes the launch of a plan: its model files, a key, a socket or port, and a log."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from proxy.errors import BadRequest
from proxy.request.variants import Adapter, with_adapter
from supervisor.builds.discover import Engine
from supervisor.builds.help import FlagValue
from supervisor.engine import prompts
from supervisor.engine.client import Endpoint
from supervisor.engine.launch import Launch, clean_environment, process_tag
from supervisor.engine.prompts import LearnedPrompts, WarmPrompt
from supervisor.errors import CorralError, ModelInvalid, SettingsInvalid
from supervisor.models import metadata, model_lookup
from supervisor.models.local_stores import Root
from supervisor.models.metadata import Gguf
from supervisor.models.stored_model import find_projector
from supervisor.plan import draft as draft_module
from supervisor.plan import embedding, loras
from supervisor.plan.auto import AUTO
from supervisor.plan.draft import Draft, offered_types
from supervisor.plan.loras import LoraSettings, loras_of
from supervisor.plan.plan import Plan, unix_sockets
from supervisor.plan.resolve import RPC, BatchingSettings, ModelEntry
from supervisor.rpc.relay import ShardRun
from supervisor.settings.schema import Settings
from supervisor.slot_store.store_config import slot_persistence
from supervisor.system.limits import is_slurm_task
from supervisor.system.paths import Directories, make_private


@dataclass(frozen=True, slots=True, order=True)
class ReplicaId:
    """A replica of a model, numbered from 0; its instance may change."""

    model: str
    number: int

    def __str__(self) -> str:
        return f"{self.model}.{self.number}"


# The path of a file, its size in bytes and its mtime in ns; None for both if there is no file.
FileVersion = tuple[Path, int | None, int | None]


def version_of(path: Path) -> FileVersion:
    try:
        found = path.stat()
    except (OSError, ValueError):  # missing, or not a path
        return path, None, None
    return path, found.st_size, found.st_mtime_ns


@dataclass(frozen=True, slots=True)
class LaunchFingerprint:
    """All inputs of an instance's command line, apart from the machine."""

    engine: FileVersion
    library_dirs: tuple[Path, ...]
    model: FileVersion
    draft: FileVersion | None
    flags: Mapping[str, FlagValue]
    args: tuple[str, ...]
    batching: BatchingSettings = field(default_factory=BatchingSettings)
    workers: tuple[str, ...] = ()
    projector: FileVersion | None = None  # found beside the model
    adapters: tuple[FileVersion, ...] = ()
    spool: Path | None = None  # the directory in memory for slot files, if they are encrypted


Flags = Mapping[str, FlagValue]


class ModelFiles:
    """Finds the files of models; `flags` are those of the profile and of the model."""

    def __init__(self, cache_dir: Path, places: Sequence[Root]) -> None:
        self._cache_dir = cache_dir
        self._places = places

    def _locate(self, path: Path) -> Path:
        """Return the file of a path or a reference.

        A reference is resolved here, as the model may be fetched after the settings were read.
        Raises ModelInvalid: the model of a reference is not stored or cannot be served.
        """
        if not model_lookup.is_reference(path):
            return path
        found = model_lookup.find(path, self._places, self._cache_dir)
        if found is None or found.problem:
            raise model_lookup.missing_model_error(path, found)
        return found.path

    def version(self, path: Path) -> FileVersion:
        with suppress(ModelInvalid):
            return version_of(self._locate(path))
        return version_of(path)

    def gguf(self, entry: ModelEntry) -> Gguf:
        """Read the metadata of a model; raises ModelInvalid."""
        return metadata.read(self._locate(entry.path), cache_dir=self._cache_dir)

    def draft(self, entry: ModelEntry, flags: Flags, engine: Engine, model: Gguf) -> Draft:
        setting = entry.draft
        if isinstance(setting, Path):
            try:
                setting = self._locate(setting)
            except ModelInvalid as error:
                return draft_module.no_draft(error.message, error.hint)
        return draft_module.choose(
            setting,
            model,
            cache_dir=self._cache_dir,
            spec_types=offered_types(engine.flags),
            takes_heads=flags.get("spec-type") == AUTO and "spec-draft-model" not in flags,
        )

    def draft_of_flag(self, chosen: Mapping[str, FlagValue]) -> Gguf | None:
        """Return the draft model that a flag names; None if there is none, or it is invalid."""
        path = chosen.get("spec-draft-model")
        with suppress(ModelInvalid):
            return metadata.read(Path(str(path)), cache_dir=self._cache_dir) if path else None
        return None

    def draft_version(self, entry: ModelEntry, flags: Flags, engine: Engine) -> FileVersion | None:
        if isinstance(entry.draft, Path):
            return self.version(entry.draft)
        with suppress(CorralError):
            found = self.draft(entry, flags, engine, self.gguf(entry))
            return version_of(found.gguf.path) if found.gguf else None
        return None

    def projector(
        self, entry: ModelEntry, flags: Flags, model: Gguf
    ) -> tuple[Path | None, list[str]]:
        """Find the projector beside a model, if none is set, and sentences about invalid files."""
        if not embedding.needs_projector_search(model, flags, entry.args):
            return None, []
        return find_projector(model, self._cache_dir)

    def projector_version(self, entry: ModelEntry, flags: Flags) -> FileVersion | None:
        with suppress(CorralError):
            found, _ = self.projector(entry, flags, self.gguf(entry))
            return version_of(found) if found else None
        return None

    def adapters(self, entry: ModelEntry, model: Gguf) -> list[Gguf]:
        """Read the adapters of a model; raises SettingsInvalid or ModelInvalid."""
        found = {
            name: metadata.read(lora.path, cache_dir=self._cache_dir)
            for name, lora in entry.loras.items()
        }
        for name, gguf in found.items():
            loras.check(name, gguf, model)
        return list(found.values())


def total_bytes(paths: Iterable[object]) -> int:
    """Return the total size of files; a missing file counts 0."""
    return sum(version_of(Path(str(path)))[1] or 0 for path in paths if path)


_LOOPBACK: Final = "127.0.0.1"


class Launches:
    """Makes the launches of one version of the settings."""

    def __init__(self, settings: Settings, directories: Directories) -> None:
        self._models = settings.models
        self._directories = directories
        self.slot_persistence = slot_persistence(directories, settings.supervisor)
        self.learned = LearnedPrompts(directories.prompts)

    def launch(self, plan: Plan, instance: str, shards: ShardRun | None = None) -> Launch:
        """Make the launch of a run, with a random key and its own socket or port.

        The engine reaches its workers through the relays of `shards`, if given. Raises
        SettingsInvalid: a warm prompt is missing; AccessDenied: the log directory cannot be used.
        """
        endpoint = self._endpoint(plan.engine, instance)
        api_key = secrets.token_hex(16)
        rpc = ",".join(map(str, shards.addresses)) if shards else None
        argv = (*_argv(plan, endpoint, rpc), *self.slot_persistence.prepare(plan, instance))
        make_private(self._directories.log)
        return Launch(
            argv=argv,
            env=clean_environment(
                os.environ,
                program=plan.engine.path,
                library_dirs=plan.engine.library_dirs,
                api_key=api_key,
                marker=process_tag(self._directories.runtime, instance, argv[0]),
            ),
            cwd=plan.engine.path.parent,
            endpoint=endpoint,
            api_key=api_key,
            log_path=self._directories.engine_log(instance),
            prompts=self._prompts(plan.model),
            has_prompt_cache=plan.has_prompt_cache,
            uses_workers=any(line.flag == f"--{RPC}" for line in plan.lines),
            surroundings=shards.serve if shards else nullcontext,
            blocks_sigterm=is_slurm_task(os.environ),
        )

    def argv(self, plan: Plan, instance: str) -> tuple[str, ...]:
        argv = _argv(plan, self._endpoint(plan.engine, instance))
        return (*argv, *self.slot_persistence.arguments(plan, instance))

    def learns_prompts(self, model: str) -> bool:
        table = self._models.get(model)
        return table is not None and table.learn_prompts

    def _prompts(self, model: str) -> tuple[WarmPrompt, ...]:
        table = self._models[model]
        learned = self.learned.prompts(model) if table.learn_prompts else []
        found = (*map(prompts.read, table.warm_prompts), *learned)
        adapters = loras_of(table.loras)
        return tuple(with_scales(prompt, adapters) for prompt in found)

    def _endpoint(self, engine: Engine, instance: str) -> Endpoint:
        socket = self._directories.engine_socket(instance) if unix_sockets(engine) else None
        return Endpoint(socket=socket, host=_LOOPBACK, port=0)


def adapters_of(found: Mapping[str, LoraSettings]) -> tuple[Adapter, ...]:
    return tuple(Adapter(name, lora.scale) for name, lora in found.items())


def with_scales(prompt: WarmPrompt, adapters: Mapping[str, LoraSettings]) -> WarmPrompt:
    """Return a prompt with a scale for each adapter of its model, 0 for those that it omits.

    Raises SettingsInvalid: it names an unknown adapter.
    """
    if not adapters:
        return prompt
    try:
        return replace(prompt, body=with_adapter(prompt.body, adapters_of(adapters), ""))
    except BadRequest as error:
        raise SettingsInvalid(f"the prompt {prompt.name}: {error.message}") from error


def _argv(plan: Plan, endpoint: Endpoint, rpc: str | None = None) -> tuple[str, ...]:
    if endpoint.socket:
        return plan.argv(host=str(endpoint.socket), port=None, rpc=rpc)
    return plan.argv(host=endpoint.host, port=endpoint.port, rpc=rpc)
