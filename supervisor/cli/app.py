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
for _group in (
    app_run.run_commands,
    app_measure.measure_commands,
    app_requests.capture_commands,
    app_setup.setup_commands,
    app_measure.usage_commands,
    app_setup.engine_commands,
    app_setup.model_commands,
    app_setup.profile_commands,
    app_setup.config_commands,
    app_run.service_commands,
    app_requests.requests_commands,
    app_setup.hooks_commands,
    app_requests.slots_commands,
    app_measure.record_commands,
    app_setup.key_commands,
    app_requests.batch_commands,
):
    app.add_typer(_group)


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
