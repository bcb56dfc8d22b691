"""How each client is called, once `corral connect` has written its settings. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final


@dataclass(frozen=True, slots=True)
class Client:
    """One client.

    Attributes:
        name: That of `corral connect`.
        package: Its name at npm or, with `is_python`, at PyPI.
        first: The words of a first turn, for a model and a prompt.
        again: The words of another turn of the same conversation.
        has_tools: Whether it offers a tool that runs commands.
        bare: More words for a model with a small context, or None if it always sends more.
        own: Files that its user has before, by their path in the home directory.
        variables: Variables that keep it quiet.
    """

    name: str
    package: str
    first: Callable[[str, str], Sequence[str]]
    again: Callable[[str, str], Sequence[str]]
    is_python: bool = False
    has_tools: bool = True
    bare: Sequence[str] | None = field(default=None)
    own: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


def _claude(*more: str) -> Callable[[str, str], Sequence[str]]:
    return lambda _, prompt: ["-p", prompt, "--allowedTools", "Bash", *more]


_CODEX: Final = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
_AIDER: Final = (
    *("--no-git", "--yes-always", "--no-check-update", "--no-show-release-notes"),
    *("--analytics-disable", "--no-pretty", "--chat-mode", "ask", "--message"),
)

# A small model may repeat itself for ever.
_SHORT: Final = ("-o", "max_tokens", "60")

CLIENTS: Final[Sequence[Client]] = (
    Client(
        name="claude",
        package="@anthropic-ai/claude-code",
        first=_claude(),
        again=_claude("--continue"),
        bare=("--system-prompt", "Answer in one sentence.", "--tools", ""),
        own={".claude/settings.json": json.dumps({"includeCoAuthoredBy": False}, indent=4)},
        variables={"DISABLE_AUTOUPDATER": "1", "DISABLE_ERROR_REPORTING": "1"},
    ),
    Client(
        name="codex",
        package="@openai/codex",
        first=lambda _, prompt: ["exec", *_CODEX, prompt],
        again=lambda _, prompt: ["exec", *_CODEX, "resume", "--last", prompt],
        own={
            ".codex/config.toml": "# mine\ncheck_for_update_on_startup = false # never\n\n"
            "[analytics]\nenabled = false\n"
        },
    ),
    Client(
        name="opencode",
        package="opencode-ai",
        first=lambda _, prompt: ["run", prompt],
        again=lambda _, prompt: ["run", "--continue", prompt],
        own={
            ".config/opencode/opencode.jsonc": "// mine\n{\n"
            '  "autoupdate": false, // never\n  "share": "disabled",\n'
            '  "permission": {"bash": "allow", "edit": "allow"},\n}\n'
        },
        variables={
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        },
    ),
    Client(
        name="llm",
        package="llm",
        is_python=True,
        has_tools=False,
        first=lambda model, prompt: ["-m", f"corral/{model}", *_SHORT, prompt],
        again=lambda model, prompt: ["-c", "-m", f"corral/{model}", *_SHORT, prompt],
        bare=(),
        own={
            ".config/io.datasette.llm/extra-openai-models.yaml": "# mine\n"
            '- model_id: "other"   # elsewhere\n  model_name: other\n'
        },
    ),
    Client(
        name="aider",
        package="aider-chat",
        is_python=True,
        has_tools=False,
        first=lambda _, prompt: [*_AIDER, prompt],
        again=lambda _, prompt: ["--restore-chat-history", *_AIDER, prompt],
        bare=(),
        own={".aider.conf.yml": "# mine\ndark-mode: true   # at night\n"},
    ),
)


def own_files(client: Client, home: Path) -> Mapping[Path, str]:
    return {home / path: text for path, text in client.own.items()}
