"""Print the table of events, as in supervisor/DESIGN.md."""

from __future__ import annotations

from supervisor.events import EVENTS

HEAD = "| event | level | fields |\n| --- | --- | --- |"


def table() -> str:
    rows = [
        f"| {name} | {level} | {', '.join(fields)} |" for name, (level, fields) in EVENTS.items()
    ]
    return "\n".join([HEAD, *rows])


if __name__ == "__main__":
    print(table())
