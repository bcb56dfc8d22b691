"""What the files of a service are made from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from supervisor.model_stores.references import is_reference
from supervisor.settings.hooks import STOP_LIMIT_S as HOOKS_STOP_LIMIT_S
from supervisor.settings.schema import ModelSettings, Settings

Scope = Literal["user", "system"]

NAME: Final = "llama-corral"
# The account of a system service, and the groups that own GPU devices on most distributions.
ACCOUNT: Final = NAME
GPU_GROUPS: Final = ("render", "video")
# The daemon's own limits end first; a slow disk or a busy machine gets this on top.
_STOP_MARGIN_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class ServiceFacts:
    """What a service runs, and for whom.

    Attributes:
        command: The absolute path of a program, and the words before `serve`.
        program_paths: What the program reads of its installation.
        environment: Variables for the daemon.
        groups: Those of GPU_GROUPS that exist on this machine.
    """

    scope: Scope
    command: tuple[str, ...]
    settings_file: Path
    settings: Settings
    program_paths: tuple[Path, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    groups: tuple[str, ...] = ()

    @property
    def serve(self) -> tuple[str, ...]:
        return (*self.command, "serve", "--config", str(self.settings_file))

    @property
    def stop_timeout_s(self) -> int:
        """The time that the daemon takes to stop at most, as in `Daemon._stop`."""
        limits = self.settings.supervisor
        saving_s = limits.slot_save_timeout_s if limits.persist_slots else 0
        own_s = limits.drain_timeout_s + 2 * limits.stop_timeout_s + saving_s
        return round(own_s + HOOKS_STOP_LIMIT_S + _STOP_MARGIN_S)

    @property
    def read_paths(self) -> tuple[Path, ...]:
        """Files and directories that the service must be able to read."""
        settings = self.settings
        models = (path for model in settings.models.values() for path in _model_paths(model))
        engine = [settings.engine] if isinstance(settings.engine, Path) else []
        own = (self.settings_file, *engine)
        return tuple(dict.fromkeys((Path(self.command[0]), *self.program_paths, *own, *models)))


def _model_paths(model: ModelSettings) -> Iterator[Path]:
    if not is_reference(model.path):  # nothing is there to read
        yield model.path
    if isinstance(model.engine, Path):
        yield model.engine
    if isinstance(model.draft, Path):
        yield model.draft
    yield from model.warm_prompts
