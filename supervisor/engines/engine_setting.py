"""The setting `engine`: an installed build, or the path of a binary."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from proxy.config.types import ExpandedPath
from supervisor.engines.installed import EngineSetting, is_build_name


def _build_name(name: str) -> str:
    if not is_build_name(name):
        raise ValueError("not the name of a build, such as b10434 or b10434-vulkan")
    return name


BuildName = Annotated[str, AfterValidator(_build_name)]
EngineField = Annotated[BuildName | ExpandedPath, Field(union_mode="left_to_right")]


def joined_engine(engine: EngineSetting | None, base: Path) -> EngineSetting | None:
    """Join a relative path to a directory; names stay."""
    return base / engine if isinstance(engine, Path) else engine
