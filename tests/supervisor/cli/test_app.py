"""The declaration of a command, and the function that it calls."""

import inspect
from importlib import import_module
from typing import Any

import pytest
import typer

from supervisor.cli.app import GROUPS, app


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


def _helps(command: Any, name: str = "corral") -> dict[str, str]:
    """The help of a command with commands, and of those below it, as on 80 columns."""
    context = command.make_context(name, [], resilient_parsing=True)
    context.terminal_width = 78  # click leaves two columns free
    inner = getattr(command, "commands", {})
    own = {name: command.get_help(context)} if inner else {}
    return own | {k: v for word in inner for k, v in _helps(inner[word], word).items()}


def test_every_command_is_in_one_group() -> None:
    names = [name for group in GROUPS.values() for name in group]
    assert sorted(names) == sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_each_command_has_a_whole_line_of_help() -> None:
    helps = _helps(typer.main.get_command(app))
    lists = {
        name: text.partition("Use it:" if name == "corral" else "Commands:")[2].splitlines()
        for name, text in helps.items()
    }
    assert len(lists) > 5
    for name, lines in lists.items():
        assert not [line for line in lines if line.endswith("...") or len(line) > 80], name
        assert not [line for line in lines if line.startswith("    ")], f"{name} has a wrapped line"
