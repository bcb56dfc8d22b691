"""How each client is configured and called. Pure, but for writing its settings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tomlkit


@dataclass(frozen=True, slots=True)
class Client:
    """One client.

    Attributes:
        package: Its name at npm.
        program: The name of its command.
        path: The endpoint that it uses.
        variables: Of its environment, for a URL and a model.
        configure: Writes its settings into a home directory, for a URL and a model.
        first: The words of a first turn, for a model and a prompt.
        again: The words of another turn of the same conversation.
        bare: More words for a model with a small context, or None where it always sends more.
    """

    package: str
    program: str
    path: str
    first: Callable[[str, str], Sequence[str]]
    again: Callable[[str, str], Sequence[str]]
    variables: Callable[[str, str], Mapping[str, str]] = lambda _url, _model: {}
    configure: Callable[[Path, str, Sequence[str]], None] = lambda _home, _url, _models: None
    bare: Sequence[str] | None = field(default=None)


def _claude_variables(url: str, model: str) -> Mapping[str, str]:
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": model,
        "ANTHROPIC_SMALL_FAST_MODEL": model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "API_TIMEOUT_MS": "300000",
    }


def _claude(*more: str) -> Callable[[str, str], Sequence[str]]:
    def words(model: str, prompt: str) -> Sequence[str]:
        return ["-p", prompt, "--model", model, "--allowedTools", "Bash", *more]

    return words


def _configure_codex(home: Path, url: str, models: Sequence[str]) -> None:
    provider = {"name": "corral", "base_url": f"{url}/v1", "wire_api": "responses"}
    settings = {
        "model": models[0],
        "model_provider": "corral",
        "check_for_update_on_startup": False,
        "analytics": {"enabled": False},
        "model_providers": {"corral": provider},
    }
    directory = home / ".codex"
    directory.mkdir(exist_ok=True)
    (directory / "config.toml").write_text(tomlkit.dumps(settings), "utf-8")


_CODEX = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")


def _configure_opencode(home: Path, url: str, models: Sequence[str]) -> None:
    settings = {
        "$schema": "https://opencode.ai/config.json",
        "autoupdate": False,
        "share": "disabled",
        "permission": {"bash": "allow", "edit": "allow"},
        "provider": {
            "corral": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "corral",
                "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
                "models": {name: {"name": name, "tool_call": True} for name in models},
            }
        },
    }
    directory = home / ".config" / "opencode"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "opencode.json").write_text(json.dumps(settings), "utf-8")


CLIENTS: Sequence[Client] = (
    Client(
        package="@anthropic-ai/claude-code",
        program="claude",
        path="/v1/messages",
        variables=_claude_variables,
        first=_claude(),
        again=_claude("--continue"),
        bare=("--system-prompt", "Answer in one sentence.", "--tools", ""),
    ),
    Client(
        package="@openai/codex",
        program="codex",
        path="/v1/responses",
        configure=_configure_codex,
        first=lambda model, prompt: ["exec", *_CODEX, "-m", model, prompt],
        again=lambda model, prompt: ["exec", *_CODEX, "-m", model, "resume", "--last", prompt],
    ),
    Client(
        package="opencode-ai",
        program="opencode",
        path="/v1/chat/completions",
        variables=lambda _url, _model: {
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
        },
        configure=_configure_opencode,
        first=lambda model, prompt: ["run", "--model", f"corral/{model}", prompt],
        again=lambda model, prompt: ["run", "--continue", "--model", f"corral/{model}", prompt],
    ),
)
