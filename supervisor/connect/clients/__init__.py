"""Client programs, one file for each; `CLIENTS` has them all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from supervisor.connect.client import Client
from supervisor.connect.clients.aider import AIDER
from supervisor.connect.clients.claude import CLAUDE
from supervisor.connect.clients.codex import CODEX
from supervisor.connect.clients.continue_dev import CONTINUE
from supervisor.connect.clients.llm import LLM
from supervisor.connect.clients.open_webui import OPEN_WEBUI
from supervisor.connect.clients.opencode import OPENCODE
from supervisor.connect.clients.zed import ZED

CLIENTS: Final[Sequence[Client]] = (
    CLAUDE,
    CODEX,
    OPENCODE,
    AIDER,
    CONTINUE,
    OPEN_WEBUI,
    ZED,
    LLM,
)
