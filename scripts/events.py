"""Draw the table of events; supervisor/DESIGN.md holds the result."""

from __future__ import annotations

from supervisor.events import EVENTS

HEAD = "| event | level | fields |\n| --- | --- | --- |"


def table() -> str:
    """Return every event, its level and its fields, as a table of Markdown."""
    rows = [
        f"| {name} | {level} | {', '.join(fields)} |" for name, (level, fields) in EVENTS.items()
    ]
    return "\n".join([HEAD, *rows])


if __name__ == "__main__":
    print(table())
