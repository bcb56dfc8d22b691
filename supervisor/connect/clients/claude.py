"""Claude Code. Source: its documentation, pages "Settings", "Environment variables", "Gateways"."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from supervisor.connect.client import Api, Client, FileFormat, FileSettings
from supervisor.connect.facts import KEY_VARIABLE, NO_KEY, Facts, Places
from supervisor.connect.place import Place

# A long prompt on a slow machine takes longer than its ten minutes.
_TIMEOUT_MS: Final = 3_600_000


def _directory(places: Places) -> Path:
    return places.named("CLAUDE_CONFIG_DIR", places.home / ".claude")


def _files(facts: Facts, places: Places) -> Sequence[FileSettings]:
    values: dict[Place, Any] = {("env", name): value for name, value in _variables(facts).items()}
    if facts.needs_key:
        values["apiKeyHelper",] = f"printenv {KEY_VARIABLE}"
    return [FileSettings(_directory(places) / "settings.json", FileFormat.JSON, values)]


def _variables(facts: Facts) -> dict[str, str]:
    main, small = facts.model.name, facts.small.name
    found = {
        "ANTHROPIC_BASE_URL": facts.url,
        "ANTHROPIC_MODEL": main,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": main,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": main,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": small,
        "ANTHROPIC_SMALL_FAST_MODEL": small,  # the name in older versions
        "CLAUDE_CODE_SUBAGENT_MODEL": main,
        "API_TIMEOUT_MS": str(_TIMEOUT_MS),
        # A line before the system prompt that differs each time, and so no prompt is found cached.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    if not facts.needs_key:
        found["ANTHROPIC_AUTH_TOKEN"] = NO_KEY
    if facts.model.context_tokens:
        found["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(facts.model.context_tokens)
    if facts.certificate:
        found["NODE_EXTRA_CA_CERTS"] = str(facts.certificate)
    return found


CLAUDE: Final = Client(
    name="claude",
    title="Claude Code",
    programs=("claude",),
    api=Api.MESSAGES,
    directory=_directory,
    files=_files,
    run=lambda _: "claude",
    key_variable=KEY_VARIABLE,
    ca_variable="NODE_EXTRA_CA_CERTS",
    writes_ca=True,
    context_least=16_384,
)
