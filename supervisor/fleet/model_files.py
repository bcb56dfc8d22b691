"""The files of a model: its GGUF, draft model, projector and adapters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from supervisor.engines.discover import Engine
from supervisor.engines.help import FlagValue
from supervisor.errors import CorralError, ModelInvalid
from supervisor.flags import draft_model, loras
from supervisor.flags import projector as projectors
from supervisor.flags.auto import AUTO
from supervisor.flags.draft_heads import offered_types
from supervisor.flags.draft_model import Draft
from supervisor.flags.plan import ModelEntry
from supervisor.fleet.launch_id import FileVersion
from supervisor.gguf import metadata
from supervisor.gguf.metadata import Gguf
from supervisor.model_stores import references
from supervisor.model_stores.projector import Projector, beside
from supervisor.model_stores.roots import Root

Flags = Mapping[str, FlagValue]


class ModelFiles:
    """Finds the files of models; `flags` are those of the model on its profile."""

    def __init__(self, cache_dir: Path, places: Sequence[Root]) -> None:
        self._cache_dir = cache_dir
        self._places = places

    def path(self, entry: ModelEntry) -> Path:
        """Return the file of a model.

        A reference stays one until the model is fetched, which may be after the settings were read.

        Raises:
            ModelInvalid: The model of a reference is not stored, or cannot be served.
        """
        if not references.is_reference(entry.path):
            return entry.path
        found = references.find(entry.path, self._places, self._cache_dir)
        if found is None or found.problem:
            raise references.missing(entry.path, found)
        return found.path

    def version(self, entry: ModelEntry) -> FileVersion:
        with suppress(ModelInvalid):
            return FileVersion.of(self.path(entry))
        return FileVersion.of(entry.path)

    def gguf(self, entry: ModelEntry) -> Gguf:
        """Read the metadata of a model; raises ModelInvalid."""
        return metadata.read(self.path(entry), cache_dir=self._cache_dir)

    def draft(self, entry: ModelEntry, flags: Flags, engine: Engine, model: Gguf) -> Draft:
        return draft_model.choose(
            entry.draft,
            model,
            cache_dir=self._cache_dir,
            spec_types=offered_types(engine.flags),
            takes_heads=flags.get("spec-type") == AUTO and "spec-draft-model" not in flags,
        )

    def draft_version(self, entry: ModelEntry, flags: Flags, engine: Engine) -> FileVersion | None:
        if isinstance(entry.draft, Path):
            return FileVersion.of(entry.draft)
        with suppress(CorralError):
            found = self.draft(entry, flags, engine, self.gguf(entry))
            return FileVersion.of(found.gguf.path) if found.gguf else None
        return None

    def projector(self, entry: ModelEntry, flags: Flags, model: Gguf) -> Projector:
        """Find the projector beside a model, where none is set."""
        if not projectors.is_looked_for(model, flags, entry.args):
            return Projector()
        return beside(model, self._cache_dir)

    def projector_version(self, entry: ModelEntry, flags: Flags) -> FileVersion | None:
        with suppress(CorralError):
            found = self.projector(entry, flags, self.gguf(entry)).path
            return FileVersion.of(found) if found else None
        return None

    def adapters(self, entry: ModelEntry, model: Gguf) -> list[Gguf]:
        """Read the adapters of a model; raises SettingsInvalid or ModelInvalid."""
        found = [metadata.read(one.path, cache_dir=self._cache_dir) for one in entry.loras]
        for one, gguf in zip(entry.loras, found, strict=True):
            loras.check(one.name, gguf, model)
        return found


def total_bytes(paths: Iterable[object]) -> int:
    """Return the size of files; one that is missing counts nothing."""
    return sum(FileVersion.of(Path(str(path))).size_bytes or 0 for path in paths if path)
