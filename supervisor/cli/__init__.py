"""The command line: each verb calls its command, shows the result, and returns an exit code.

A verb imports its command when it runs, so that `--help` and `corral status` start fast.
"""

from supervisor.cli.app import main

__all__ = ["main"]
