"""The format of a file by its name in the table of clients."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Protocol, cast

from supervisor.connect.client import FileFormat
from supervisor.connect.formats import env, jsonc, toml, yaml
from supervisor.connect.place import Place


class Texts(Protocol):
    """All raise ValueError for a text of another format, TypeError for a place that cannot be."""

    def read(self, text: str, place: Place) -> Any:
        """Return the value at a place, or ABSENT."""

    def put(self, text: str, place: Place, value: Any) -> str:
        """Return the text with a value at a place."""

    def drop(self, text: str, place: Place) -> str:
        """Return the text without the value at a place, which is there."""


_TEXTS: Final[Mapping[FileFormat, Texts]] = MappingProxyType(
    {
        FileFormat.JSON: cast("Texts", jsonc),
        FileFormat.TOML: cast("Texts", toml),
        FileFormat.YAML: cast("Texts", yaml),
        FileFormat.ENV: cast("Texts", env),
    }
)


def texts_of(file_format: FileFormat) -> Texts:
    return _TEXTS[file_format]
