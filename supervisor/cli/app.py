"""`corral`: all commands."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from supervisor import __version__
from supervisor.cli import (
    batch,
    capture,
    config,
    engine,
    hooks,
    key,
    measure,
    model,
    profile,
    record,
    requests,
    run,
    service,
    setup,
    slots,
    usage,
)
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
app.add_typer(run.commands)
app.add_typer(measure.commands)
app.add_typer(capture.commands)
app.add_typer(setup.commands)
app.add_typer(usage.commands)
app.add_typer(engine.commands, name="engine")
app.add_typer(model.commands, name="model")
app.add_typer(profile.commands, name="profile")
app.add_typer(config.commands, name="config")
app.add_typer(service.commands, name="service")
app.add_typer(requests.commands, name="requests")
app.add_typer(hooks.commands, name="hooks")
app.add_typer(slots.commands, name="slots")
app.add_typer(record.commands, name="record")
app.add_typer(key.commands, name="key")
app.add_typer(batch.commands, name="batch")


def main() -> None:
    try:
        app()
    except KeyboardInterrupt:  # while the command line is read; commands show their own
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
