"""The command line: each verb calls its command, shows the result, and returns an exit code.

`app*.py` have the signatures and import nothing heavy; every other module does what the verbs of
one noun do, and is imported when such a verb runs: `--help` and `corral status` start fast.
"""


def main() -> None:
    """Run the command line."""
    # The daemon is a module of this package, and needs neither Typer nor the signatures.
    from supervisor.cli.app import main as run

    run()
