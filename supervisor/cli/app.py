"""Builds `corral` from the groups of commands."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from supervisor import __version__
from supervisor.cli import app_measure, app_requests, app_run, app_setup
from supervisor.errors import Interrupted

_HELP: Final = """Run llama.cpp's llama-server well.

Examples:

  corral model get smollm2              fetch the demo model

  corral start smollm2                  serve it in the background

  corral start ~/models/qwen3.gguf      serve any GGUF file

  corral status                         state, load and speed

  corral stop                           finish running requests, then stop

Exit codes: 0 success, 1 failure, 2 usage error, 3 not running, 4 no such model,
69 daemon or machine busy, 78 invalid settings, 130 interrupted.
"""

app = typer.Typer(
    name="corral",
    help=_HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(app_run.run_commands)
app.add_typer(app_measure.measure_commands)
app.add_typer(app_requests.capture_commands)
app.add_typer(app_setup.setup_commands)
app.add_typer(app_measure.usage_commands)
app.add_typer(app_setup.engine_commands, name="engine")
app.add_typer(app_setup.model_commands, name="model")
app.add_typer(app_setup.profile_commands, name="profile")
app.add_typer(app_setup.config_commands, name="config")
app.add_typer(app_run.service_commands, name="service")
app.add_typer(app_requests.requests_commands, name="requests")
app.add_typer(app_setup.hooks_commands, name="hooks")
app.add_typer(app_requests.slots_commands, name="slots")
app.add_typer(app_measure.record_commands, name="record")
app.add_typer(app_setup.key_commands, name="key")
app.add_typer(app_requests.batch_commands, name="batch")


def main() -> None:
    try:
        app()
    except KeyboardInterrupt:  # while arguments are parsed; `run_command` handles later ones
        raise SystemExit(Interrupted.exit_code) from None


def _version(value: bool) -> None:  # noqa: FBT001 (Typer passes an option's value by position)
    if value:
        typer.echo(f"llama-corral {__version__}")
        raise typer.Exit


@app.callback()
def _corral(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


_corral.__doc__ = _HELP
