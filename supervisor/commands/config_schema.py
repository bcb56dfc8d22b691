"""`corral config schema`: the JSON Schema of corral.toml, for editors."""

from __future__ import annotations

import json
import os
from pathlib import Path

from supervisor.errors import AccessDenied
from supervisor.host.files import write_atomic
from supervisor.host.paths import directories, make_private
from supervisor.output import CommandResult
from supervisor.settings.edit import Edit, write_file
from supervisor.settings.json_schema import DIRECTIVE, json_schema
from supervisor.settings.json_schema import FILE_NAME as SCHEMA_NAME
from supervisor.settings.load import FILE_NAME, find_file


def schema() -> CommandResult:
    """Show the schema."""
    made = json_schema()
    return CommandResult(made, json.dumps(made, indent=2))


def write_schema(config: Path | None) -> CommandResult:
    """Write the schema beside the settings file, whose first line then points editors to it."""
    where = directories().config
    path = find_file(config, config_dir=where, environ=os.environ) or where / FILE_NAME
    beside = path.with_name(SCHEMA_NAME)
    try:
        if not path.parent.exists():
            make_private(path.parent)
        write_atomic(beside, json.dumps(json_schema(), indent=2) + "\n")
    except OSError as error:
        raise AccessDenied(f"{beside} cannot be written: {error.strerror}") from error
    write_file(path, _with_directive)
    return CommandResult({"file": str(path), "schema": str(beside)}, f"{beside}\n{path}")


def _with_directive(text: str) -> Edit:
    is_there = text.startswith("#:schema ")
    return Edit(text if is_there else f"{DIRECTIVE}\n{text}", ())
