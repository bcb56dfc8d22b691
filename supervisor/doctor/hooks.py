"""Checks of hooks: whether each program can be run."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import get_args

from supervisor.doctor.finding import Finding
from supervisor.hooks.command import hook_command, hook_directory, missing_program
from supervisor.hooks.hook_event import example
from supervisor.settings.hooks import HookName
from supervisor.settings.load import Loaded


def check_hooks(loaded: Loaded) -> Iterator[Finding]:
    """Yield a finding for each hook that has commands."""
    directory = hook_directory(loaded.path)
    for hook in get_args(HookName):
        event = example(hook, datetime.now(tz=UTC), "chat", "node")
        commands = loaded.settings.hooks.commands(hook)
        problems = [missing_program(hook_command(one, event, directory)) for one in commands]
        if problem := next(filter(None, problems), None):
            yield Finding(
                f"hook {hook}", "fail", problem, f"set hooks.{hook} to a program that exists"
            )
        elif commands:
            programs = ", ".join(words[0] for words in commands)
            fix = f"`corral hooks test {hook}` tries it"
            yield Finding(f"hook {hook}", "ok", f"runs {programs}; {fix}")
