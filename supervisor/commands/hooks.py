"""`corral hooks`: the commands that run when something happens, and a trial of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

from supervisor.errors import SettingsInvalid
from supervisor.hooks.command import HookRun, hook_command, hook_directory, run_command
from supervisor.hooks.hook_event import HookEvent, example
from supervisor.host.paths import directories
from supervisor.output import CommandResult, colored, table
from supervisor.settings.hooks import HookName
from supervisor.settings.load import Loaded, load

_HOOKS: tuple[HookName, ...] = get_args(HookName)
_NODE = "node"
_MODEL = "chat"


def list_hooks(config: Path | None) -> CommandResult:
    """List the hooks that have commands; works without a daemon."""
    hooks = load(config, config_dir=directories().config).settings.hooks
    found = {hook: hooks.commands(hook) for hook in _HOOKS if hooks.commands(hook)}
    rows = [(hook, json.dumps(words)) for hook, commands in found.items() for words in commands]
    text = table(("HOOK", "COMMAND"), rows) if rows else _no_hooks()
    return CommandResult(found, text)


def try_hook(hook: str, config: Path | None) -> CommandResult:
    """Run the commands of a hook with an example event; exit code 1 if one fails."""
    if hook not in _HOOKS:
        raise SettingsInvalid(f"there is no hook {hook}", hint=f"there are {', '.join(_HOOKS)}")
    loaded = load(config, config_dir=directories().config)
    commands = loaded.settings.hooks.commands(hook)
    if not commands:
        raise SettingsInvalid(f"hooks.{hook} has no command", hint=_no_hooks(hook))
    event = _example(hook, loaded)
    runs = asyncio.run(_run(commands, event, loaded))
    lines = [f"{colored('event', 'dim')} {event.as_json().decode().strip()}"]
    for words, run in zip(commands, runs, strict=True):
        lines += ["", *_describe(words, run)]
    data = [{"command": words, **asdict(run)} for words, run in zip(commands, runs, strict=True)]
    exit_code = 1 if any(run.problem for run in runs) else 0
    return CommandResult(data, "\n".join(lines), exit_code=exit_code)


def _example(hook: HookName, loaded: Loaded) -> HookEvent:
    model = next(iter(loaded.settings.models), _MODEL)
    return example(hook, datetime.now(tz=UTC), model, next(iter(loaded.settings.nodes), _NODE))


async def _run(
    commands: Sequence[tuple[str, ...]], event: HookEvent, loaded: Loaded
) -> list[HookRun]:
    directory, timeout_s = hook_directory(loaded.path), loaded.settings.hooks.timeout_s
    return [
        await run_command(hook_command(words, event, directory), event.as_json(), timeout_s)
        for words in commands
    ]


def _describe(words: Sequence[str], run: HookRun) -> list[str]:
    verdict = colored(f"failed: {run.problem}", "red") if run.problem else "exited with code 0"
    output = [f"  {line}" for line in run.output.splitlines()]
    return [json.dumps(words), *output, f"{verdict} after {run.duration_s or 0:.2f} s"]


def _no_hooks(hook: str = "model_loaded") -> str:
    return f'no hook is set; in corral.toml: [hooks] {hook} = ["notify-send", "llama-corral"]'
