"""The command line: each verb calls a function, shows its result, and returns an exit code.

`app.main` is the program. `app*.py` declare arguments and import nothing heavy, so `--help` and
`corral status` start fast. Each other module has the functions of one noun or a few verbs, and is
imported when such a verb runs; a declaration without a body names the function to call.
"""


def main() -> None:
    """Run the command line."""
    # The daemon is a module of this package, and needs neither Typer nor the signatures.
    from supervisor.cli.app import main as run

    run()
