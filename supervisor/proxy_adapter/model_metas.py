"""What the files of models tell clients; read once for each version of a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from supervisor.errors import ModelInvalid
from supervisor.flags.plan import ModelEntry
from supervisor.fleet.launch_id import FileVersion
from supervisor.fleet.planner import file_version
from supervisor.gguf.metadata import Gguf
from supervisor.gguf.model_meta import model_meta

Meta = Mapping[str, int | str]

# More models than a settings file has; those that a reload removed are among them.
_KNOWN_MAX: Final = 1024
_NOTHING: Final[Meta] = MappingProxyType({})


class ModelMetas:
    """By model; `read` raises ModelInvalid."""

    def __init__(self, read: Callable[[str], Gguf]) -> None:
        self._read = read
        self._known: dict[str, tuple[FileVersion, Meta]] = {}

    def of(self, entry: ModelEntry) -> Meta:
        """Return what is known of a model; nothing where its file cannot be read.

        A new file takes some milliseconds, or a tenth of a second where it was never planned.
        """
        version, known = file_version(entry.path), self._known.get(entry.name)
        if known is None or known[0] != version:
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            known = self._known[entry.name] = version, self._of_file(entry.name)
        return known[1]

    def _of_file(self, model: str) -> Meta:
        try:
            return MappingProxyType(dict(model_meta(self._read(model))))
        except ModelInvalid:  # its start reports why
            return _NOTHING
