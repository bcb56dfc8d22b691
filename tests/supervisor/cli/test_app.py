"""What is declared of a command, and what it calls."""

import inspect
from importlib import import_module
from typing import Any

import pytest

from supervisor.cli.app import app


def _commands() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for entry in app.registered_groups:
        group: Any = entry.typer_instance
        if group.registered_callback:
            found[group.info.name] = group.registered_callback.callback
        for command in group.registered_commands:
            found[f"{group.info.name or ''} {command.name}".strip()] = command.callback
    return found


def _target(command: Any) -> str:
    return str(inspect.getclosurevars(command).nonlocals["target"])


_COMMANDS = _commands()


@pytest.mark.parametrize("name", [name for name, run in _COMMANDS.items() if _target(run)])
def test_a_command_calls_a_function_with_the_same_parameters(name: str) -> None:
    command: Any = _COMMANDS[name]
    module, _, function = _target(command).partition(".")
    called = getattr(import_module(f"supervisor.cli.{module}"), function)
    assert set(inspect.signature(called).parameters) == set(
        inspect.signature(command.__wrapped__).parameters
    )
