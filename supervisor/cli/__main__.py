"""`python -m supervisor.cli`."""

from supervisor.cli import main

if __name__ == "__main__":
    main()
