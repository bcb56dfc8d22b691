"""Services to generate files for."""

from pathlib import Path
from typing import Any

from supervisor.service.units import Scope, ServiceFacts
from supervisor.settings.schema import Settings

PROGRAM = "/bin/true"  # is there, so that `systemd-analyze verify` finds it
MODELS = {"chat": {"path": "/srv/models/chat.gguf"}}


def facts(scope: Scope = "system", *, program: str = PROGRAM, **settings: Any) -> ServiceFacts:
    return ServiceFacts(
        scope,
        (program,),
        Path("/etc/llama-corral/corral.toml"),
        Settings(**{"models": MODELS, **settings}),
    )
