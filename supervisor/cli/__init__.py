"""The command line: each verb calls its command, shows the result, and returns an exit code.

`app*.py` have the signatures and import nothing heavy; every other module does what the verbs of
one noun do, and is imported when such a verb runs: `--help` and `corral status` start fast.
"""

from supervisor.cli.app import main

__all__ = ["main"]
