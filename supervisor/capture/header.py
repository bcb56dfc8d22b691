"""The first line of a capture: which model, engine and flags answered."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from supervisor import __version__
from supervisor.capture.limits import CaptureLimits
from supervisor.capture.lines import header_line
from supervisor.errors import ModelInvalid
from supervisor.flags.plan import Plan
from supervisor.fleet.planner import LaunchPlanner
from supervisor.host.files import open_regular

_ENDS_BYTES: Final = 1024**2
# The name and the path of the model have members of their own.
_OMITTED: Final = frozenset({"--model", "--alias"})


def header(planner: LaunchPlanner, model: str, limits: CaptureLimits) -> bytes:
    """Return the line; reads files. Raises what a plan of the model raises."""
    plan = planner.plan(model)
    return header_line(
        {
            "corral": __version__,
            "began_at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "model": model,
            "fingerprint": model_fingerprint(plan.gguf.path),
            "build": plan.engine.build,
            "slots": plan.slots,
            "ctx_size": plan.ctx_size,
            "flags": flags_of(plan),
            "limits": {
                "duration_s": limits.duration_s,
                "size_bytes": limits.size_bytes,
                "requests": limits.requests,
            },
        }
    )


def flags_of(plan: Plan) -> dict[str, str | None]:
    """Return the options on the command line, without the address and with `~` for the home."""
    home = os.path.expanduser("~")  # noqa: PTH111 (a text, and no error without a home)
    return {
        one.flag: one.value.replace(home, "~") if one.value else None
        for one in plan.lines
        if one.flag not in _OMITTED
    }


def model_fingerprint(path: Path) -> Mapping[str, Any]:
    """Return what identifies a model file; raises ModelInvalid.

    The digest is of its size, its first and its last MiB: gigabytes would take a minute.
    """
    digest = hashlib.sha256()
    try:
        with open_regular(path) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            digest.update(str(size_bytes).encode())
            digest.update(file.read(_ENDS_BYTES))
            file.seek(max(0, size_bytes - _ENDS_BYTES))
            digest.update(file.read(_ENDS_BYTES))
    except OSError as error:
        raise ModelInvalid(f"cannot read the model {path}: {error.strerror}") from error
    return {"file": path.name, "size_bytes": size_bytes, "sha256_of_ends": digest.hexdigest()}
