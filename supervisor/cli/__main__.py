"""Runs `corral` as `python -m supervisor.cli`."""

from supervisor.cli.app import main

if __name__ == "__main__":
    main()
